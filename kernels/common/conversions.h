// Number formats: finite tests, the canonical NaN, bf16 and fp16. Templated on the vector type, see
// lane.h, except fp16, which every vector unit converts in hardware.
#pragma once

#include "kernels/common/lane.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Magnitudes compare as integers: NaN and infinity are what is not below the bits of infinity.
// (A floating-point maximum would lose a NaN.)
template <typename F>
GRADFERRY_LANE BitsOf<F> magnitude_bits(F x) {
  return bits(x) & BitsOf<F>(kMagnitudeBits);
}
template <typename F>
GRADFERRY_LANE auto is_not_finite(F x) {
  return magnitude_bits(x) >= BitsOf<F>(kInfinityBits);
}
template <typename F>
GRADFERRY_LANE auto is_nan(F x) {
  return magnitude_bits(x) >= BitsOf<F>(kInfinityBits + 1);
}
// A single comparison each, where a lane is a plain float.
GRADFERRY_LANE bool is_not_finite(float x) {
  return !(__builtin_fabsf(x) < from_bits(kInfinityBits));
}
GRADFERRY_LANE bool is_nan(float x) { return x != x; }
template <typename F>
GRADFERRY_LANE F canonical(F x) {
  return select(is_nan(x), from_bits(BitsOf<F>(kNanBits)), x);
}

template <typename U>
GRADFERRY_LANE auto bf16_to_float(U x) {
  return from_bits(x << 16);
}

// Rounded to nearest, ties to even; overflow gives infinity, every NaN the canonical one.
template <typename F>
GRADFERRY_LANE BitsOf<F> float_to_bf16(F x) {
  using U = BitsOf<F>;
  const U rounded = (bits(x) + (U(0x7fffu) + ((bits(x) >> 16) & U(1u)))) >> 16;
  return select(is_nan(x), U(kNanBits >> 16), rounded);
}

// Before float_to_bf16: finite numbers that would round to infinity become the largest bf16.
template <typename F>
GRADFERRY_LANE F saturate_bf16(F x) {
  using U = BitsOf<F>;
  constexpr uint32_t kLargest = 0x7f7f0000u;
  const U magnitude = magnitude_bits(x);
  const auto too_large = (magnitude >= U(kLargest)) & (magnitude <= U(kInfinityBits - 1));
  return select(too_large, from_bits((bits(x) & U(kSignBit)) | U(kLargest)), x);
}

// Without branches, which would delay the next loads on a GPU.
GRADFERRY_LANE float fp16_to_float(uint32_t x) {
  const uint32_t shifted = (x & 0x7fffu) << 13;
  const uint32_t normal = shifted + (112u << 23);
  // Zero and subnormals: give them an implicit one, then take it away again, exactly.
  const uint32_t subnormal = bits(from_bits(normal + (1u << 23)) - from_bits(113u << 23));
  const uint32_t finite = select(shifted < (1u << 23), subnormal, normal);
  // Infinity and NaN keep an exponent of all ones.
  return from_bits(or_where(shifted >= 0x0f800000u, finite, kInfinityBits) | ((x & 0x8000u) << 16));
}

// Rounded to nearest, ties to even; overflow gives infinity, every NaN the canonical one.
GRADFERRY_LANE uint32_t float_to_fp16(float x) {
  const uint32_t sign = (bits(x) >> 16) & 0x8000u;
  const uint32_t magnitude = magnitude_bits(x);
  // Below 2^-14 results are subnormal: the last place of 0.5f is the last place of fp16 there.
  const uint32_t subnormal = bits(from_bits(magnitude) + 0.5f) - bits(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t in_range = select(magnitude < 0x38800000u, subnormal, normal);
  // From 65536 on infinity.
  const uint32_t number = sign | select(magnitude >= 0x47800000u, 0x7c00u, in_range);
  return select(magnitude > kInfinityBits, 0x7e00u, number);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
