// One lane of arithmetic: the operations that every vector type of kernels/ has, for plain float
// and uint32_t. A codec's <codec>_layout.h is written once against these names and serves the
// scalar kernels and CUDA through this header, AVX2 and AVX-512 through the overloads in simd_*.h.
//
// Everything is in a namespace per target (GRADFERRY_KERNEL_NAMESPACE, set by the build for each
// object file) and is always inlined. Otherwise the linker, which keeps one copy of an inline
// function, could use the one compiled with AVX-512 in the scalar kernels.
#pragma once

#include <cstdint>

#ifndef GRADFERRY_KERNEL_NAMESPACE
#define GRADFERRY_KERNEL_NAMESPACE portable
#endif

#if defined(__CUDACC__)
#define GRADFERRY_LANE __host__ __device__ __forceinline__
#else
#define GRADFERRY_LANE [[gnu::always_inline]] inline
#endif

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

inline constexpr uint32_t kSignBit = 0x80000000u;
inline constexpr uint32_t kMagnitudeBits = 0x7fffffffu;
inline constexpr uint32_t kInfinityBits = 0x7f800000u;
inline constexpr uint32_t kNanBits = 0x7fc00000u;  // the only NaN that is ever written

GRADFERRY_LANE uint32_t bits(float x) {
  uint32_t result;
  __builtin_memcpy(&result, &x, sizeof(result));
  return result;
}
GRADFERRY_LANE float from_bits(uint32_t x) {
  float result;
  __builtin_memcpy(&result, &x, sizeof(result));
  return result;
}

GRADFERRY_LANE float select(bool condition, float a, float b) { return condition ? a : b; }
GRADFERRY_LANE uint32_t select(bool condition, uint32_t a, uint32_t b) { return condition ? a : b; }
GRADFERRY_LANE uint32_t or_where(bool condition, uint32_t a, uint32_t b) {
  return condition ? a | b : a;
}
GRADFERRY_LANE bool any(bool condition) { return condition; }

// With a NaN operand these return b, as the x86 instructions do.
GRADFERRY_LANE float minimum(float a, float b) { return a < b ? a : b; }
GRADFERRY_LANE float maximum(float a, float b) { return a > b ? a : b; }
GRADFERRY_LANE uint32_t maximum(uint32_t a, uint32_t b) { return a > b ? a : b; }

GRADFERRY_LANE float square_root(float x) { return __builtin_sqrtf(x); }

// The upper half of the 64-bit product.
GRADFERRY_LANE uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((uint64_t{a} * b) >> 32);
}

// The unsigned type with as many lanes as F.
template <typename F>
using BitsOf = decltype(bits(F()));

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
