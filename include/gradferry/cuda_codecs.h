// The codecs on CUDA, in a separate library (gradferry::kernels_cuda), so that the rest needs no
// CUDA.
//
// Their functions follow the contract of codec.h with pointers into device memory: gradient,
// residual, payloads, tiles, status, gain, and payload_by_rank, both the array and its targets.
// Only `options` is in host memory. Functions enqueue work on TileBatch::stream and do not wait for
// it; none of these buffers may change until it is done. Results equal those of the CPU, to the
// bit.
#pragma once

#include "gradferry/device_library.h"

namespace gradferry {

const DeviceLibrary& cuda_library();

// From now on codecs(Device::kCuda) lists them. Call it once, before other threads ask for codecs.
// It does not access a device.
inline void use_cuda_codecs() { use_device_library(cuda_library()); }

}  // namespace gradferry
