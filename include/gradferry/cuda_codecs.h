// The codecs on CUDA: a library of their own (gradferry::kernels_cuda), so that the rest needs no
// CUDA.
//
// Their functions follow the contract of codec.h with pointers into device memory: gradient,
// residual, payloads, tiles, status, gain, and payload_by_rank, both the array and what it points
// to. `options` alone is host memory. Work is enqueued on TileBatch::stream and nothing waits for
// it; all of these must stay as they are until it is done. They give the bytes and numbers that the
// CPU gives.
#pragma once

#include "gradferry/device_library.h"

namespace gradferry {

const DeviceLibrary& cuda_library();

// From now on codecs(Device::kCuda) lists them. Call it once, before other threads ask for codecs;
// it does not touch a device.
inline void use_cuda_codecs() { use_device_library(cuda_library()); }

}  // namespace gradferry
