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

GRADFERRY_LANE float fp16_to_float(uint32_t x) {
  const uint32_t shifted = (x & 0x7fffu) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  uint32_t result = shifted + (112u << 23);
  if (exponent == 0x0f800000u) {
    result += 112u << 23;  // infinity and NaN keep an exponent of all ones
  } else if (exponent == 0) {
    // Zero and subnormals: give them an implicit one, then take it away again, exactly.
    result = bits(from_bits(result + (1u << 23)) - from_bits(113u << 23));
  }
  return from_bits(result | ((x & 0x8000u) << 16));
}

// Rounded to nearest, ties to even; overflow gives infinity, every NaN the canonical one.
GRADFERRY_LANE uint32_t float_to_fp16(float x) {
  const uint32_t sign = (bits(x) >> 16) & 0x8000u;
  const uint32_t magnitude = magnitude_bits(x);
  if (magnitude > kInfinityBits) return 0x7e00u;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // 65536 and above
  if (magnitude < 0x38800000u) {
    // Below 2^-14 results are subnormal: the last place of 0.5f is the last place of fp16 there.
    return sign | (bits(from_bits(magnitude) + 0.5f) - bits(0.5f));
  }
  return sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
