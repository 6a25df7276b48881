// The codecs on CUDA, in a separate library (gradferry::kernels_cuda), so that the rest needs no
// CUDA. Its kernels process chunks, as device_library.h describes them. Payloads, gradients and
// residuals equal those of the CPU, to the bit.
#pragma once

#include "gradferry/device_library.h"

namespace gradferry {

const DeviceLibrary& cuda_library();

// From now on chunk_kernels() and the like return its kernels. Call it once, before other threads
// use them. It does not access a device.
inline void use_cuda_codecs() { use_device_library(cuda_library()); }

}  // namespace gradferry
