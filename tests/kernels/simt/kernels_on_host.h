// The kernels of kernels/*/*_cuda.cu, kernels/chunk_kernels.cu and kernels/common/*.cu as a program
// runs them, called with host memory: by the emulator (emulated_kernels.cpp), or by a GPU
// (tests/kernels/cuda/gpu_kernels.cpp).
#pragma once

#include "gradferry/device_library.h"

namespace gradferry::testing {

const ChunkKernels& chunk_kernels_on_host();
const NodeKernels& node_kernels_on_host();
const MessageKernels& message_kernels_on_host();

// Whether the emulator runs them, and whether it does so under ThreadSanitizer, where a tile takes
// a hundred times as long.
bool kernels_are_emulated();
bool kernels_are_sanitized();

// In which order threads run from the next call on, where that can be chosen.
void set_schedule(uint64_t seed);

}  // namespace gradferry::testing
