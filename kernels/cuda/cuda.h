// What .cu files share of CUDA. docs/design/adding_a_codec.md has the rules that kernels follow.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "gradferry/device_library.h"
#include "gradferry/error.h"
#include "kernels/common/lane.h"

#define GRADFERRY_DEVICE __device__ __forceinline__
#define GRADFERRY_UNROLL _Pragma("unroll")
#define GRADFERRY_SHARED(Type, name) __shared__ Type name

#define GRADFERRY_CUDA_TRY(call)                                                            \
  do {                                                                                      \
    const cudaError_t error = (call);                                                       \
    GRADFERRY_EXPECTS(error == cudaSuccess, kState,                                         \
                      std::string("CUDA refused " #call ": ") + cudaGetErrorString(error) + \
                          "; an error of earlier work shows here too: run with "            \
                          "CUDA_LAUNCH_BLOCKING=1 to find it");                             \
  } while (false)
#define GRADFERRY_CHECK_LAUNCH() GRADFERRY_CUDA_TRY(cudaGetLastError())

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

inline constexpr uint32_t kWarpLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// For counting instructions (tools/count_sass.py), what this begins is not there: tiles are whole
// and aligned, and their numbers finite.
GRADFERRY_DEVICE void rare_path() {
#if defined(GRADFERRY_HOT_PATH_ONLY)
  __trap();
  __builtin_unreachable();
#endif
}

// x, of which the compiler knows nothing: what follows from it is computed anew from tile to tile,
// or from rank to rank, and takes no registers in between.
GRADFERRY_DEVICE uint32_t fresh(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// a * b + c, of a product that is exact: the sum is rounded once, as it would be otherwise. The
// machine of tests/kernels/ptx takes no other fused product, and knows this one by the name.
GRADFERRY_DEVICE float add_product(float a, float b, float c) {
  float sum;
  asm("{\n"
      ".reg .f32 exact;\n"
      "fma.rn.f32 exact, %1, %2, %3;\n"
      "mov.f32 %0, exact;\n"
      "}"
      : "=f"(sum)
      : "f"(a), "f"(b), "f"(c));
  return sum;
}

// kKernel<<<num_blocks, num_threads, 0, stream>>>(args...), unless there are no blocks.
template <auto kKernel, typename... Args>
void launch(uint32_t num_blocks, uint32_t num_threads, Stream stream, const Args&... args) {
  if (num_blocks == 0) return;
  // clang-format off
  kKernel<<<num_blocks, num_threads, 0, static_cast<cudaStream_t>(stream)>>>(args...);
  // clang-format on
  GRADFERRY_CHECK_LAUNCH();
}

// --- memory
//
// A T at an address that is a multiple of its size. With T = Bytes16 or Bytes8 a single access
// moves that many bytes.
struct alignas(16) Bytes16 {
  uint32_t word[4];
};
struct alignas(8) Bytes8 {
  uint32_t word[2];
};

template <typename T>
GRADFERRY_DEVICE T read(const void* p) {
  return *static_cast<const T*>(p);
}

template <typename T>
GRADFERRY_DEVICE void write(void* p, T value) {
  *static_cast<T*>(p) = value;
}

// As much shared memory as a tile of floats takes, the same wherever it is asked for. A warp's
// slice of it is the warp's, from one of its barriers to the next; all of it the block's, between
// two of the block's, in sums of sparse payloads (tile_kernels.h).
GRADFERRY_DEVICE float* scratch() {
  GRADFERRY_SHARED(Bytes16, shared[kTileElements / 4]);
  return reinterpret_cast<float*>(shared);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
