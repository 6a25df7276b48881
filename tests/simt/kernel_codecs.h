// The kernels of kernels/*/*_cuda.cu, kernels/chunk_kernels.cu and kernels/common/*.cu as a program
// runs them, called with host memory: by the emulator (emulated_codecs.cpp), or by a GPU
// (tests/cuda/gpu_codecs.cpp).
#pragma once

#include "gradferry/device_library.h"

namespace gradferry::testing {

// Named as in the table of codecs; null when it has no CUDA source.
const Codec* find_kernels(std::string_view name);

const ChunkKernels& chunk_kernels_on_host();
const NodeKernels& node_kernels_on_host();
const MessageKernels& message_kernels_on_host();

// In which order threads run from the next call on, where that can be chosen.
void set_schedule(uint64_t seed);

}  // namespace gradferry::testing
