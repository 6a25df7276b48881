// q4: 4-bit E2M1 codes, an E4M3 scale per block of 32, a power of two per group of 1024.
// The byte format and arithmetic of docs/wire_format.md, section "q4", once for every target.
//
//   value = code * S,  S = scale * 2^k
// code has 2 significant bits and scale 4, so the product is exact: no rounding, and no fused
// multiply-add, can make residuals differ between targets.
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/common/conversions.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4 {

inline constexpr uint32_t kBlock = 32;
inline constexpr uint32_t kHalfBlock = 16;  // bytes of a block's codes; element j + 16 sits above j
inline constexpr uint32_t kGroup = 1024;
inline constexpr uint32_t kGroupBlocks = kGroup / kBlock;

// k: with it the largest block scale of a group lies in 170.7 .. 352, inside E4M3's range.
inline constexpr int32_t kSmallestExponent = -118;  // S is at least 2^-124, 1 / S finite
inline constexpr int32_t kLargestExponent = 117;    // what the largest float needs
inline constexpr int32_t kExponentBias = 128;
inline constexpr uint32_t kNonFiniteExponent = 255;

inline constexpr uint32_t kSmallestScaleCode = 0x08;  // 2^-6, E4M3's smallest normal number
inline constexpr uint32_t kLargestScaleCode = 0x7e;   // 448
inline constexpr uint32_t kCappedScaleCode = 0x7a;    // 320: with k = 117, 6 S stays finite

GRADFERRY_LANE uint32_t num_blocks(uint32_t num_elements) { return (num_elements + 31) / 32; }
GRADFERRY_LANE uint32_t num_groups(uint32_t num_elements) { return (num_elements + 1023) / 1024; }
GRADFERRY_LANE uint32_t scales_offset(uint32_t num_elements) {
  return kHalfBlock * num_blocks(num_elements);
}
GRADFERRY_LANE uint32_t exponents_offset(uint32_t num_elements) {
  return (kHalfBlock + 1) * num_blocks(num_elements);
}
GRADFERRY_LANE uint32_t payload_bytes(uint32_t num_elements, ScalarType, Stage,
                                      const CodecOptions&) {
  return round_up(exponents_offset(num_elements) + num_groups(num_elements), kPayloadAlignment);
}

// 2^exponent, for exponents of normal numbers.
GRADFERRY_LANE float power_of_two(int32_t exponent) {
  return from_bits(static_cast<uint32_t>(exponent + 127) << 23);
}

// k of a group with this largest magnitude, given as bits of a finite number. The exponent field of
// a subnormal number reads as 2^-127, which is below the floor like the number itself.
GRADFERRY_LANE int32_t group_exponent(uint32_t largest_bits) {
  const int32_t k = static_cast<int32_t>(largest_bits >> 23) - 127 - 10;
  return k < kSmallestExponent ? kSmallestExponent : k;
}

template <typename F>
struct BlockScale {
  BitsOf<F> code;  // the scale byte; 0: the block is zero
  F scale;         // S, or 0
  F reciprocal;    // 1 / S, or 0
};

// The scale of a block whose largest magnitude is `largest`, in a group with exponent k.
template <typename F>
GRADFERRY_LANE BlockScale<F> block_scale(F largest, int32_t k) {
  using U = BitsOf<F>;
  const F y = (largest * F(power_of_two(-k))) / F(6.0f);
  // Rounds to 4 significant bits; a carry runs into the exponent, as it should.
  const U rounded = (bits(y) + (U(0x7ffffu) + ((bits(y) >> 20) & U(1u)))) & U(0xfff00000u);
  const F s = minimum(from_bits(rounded), F(k == kLargestExponent ? 320.0f : 448.0f));
  const auto is_zero = s < F(0x1p-6f);
  const U exponent = U(static_cast<uint32_t>(k) << 23);
  const F scale = from_bits(bits(s) + exponent);
  const U code = (bits(s) >> 20) - U((127u - 7u) << 3);
  return {select(is_zero, U(0u), code), select(is_zero, F(0.0f), scale),
          select(is_zero, F(0.0f), F(1.0f) / scale)};
}

// S of a valid scale byte; 0 of byte 0.
template <typename U>
GRADFERRY_LANE auto decode_scale(U code, int32_t k) {
  const U exponent = U(static_cast<uint32_t>(k + (127 - 7)) << 23);
  return from_bits(select(code == U(0u), U(0u), (code << 20) + exponent));
}

template <typename F>
struct Element {
  BitsOf<F> code;  // 4 bits
  F value;         // what the code decodes to
};

// Rounds a finite v to E2M1. Adding M = (2^23 + 2) last places, a last place being half of t's
// power of two (at least 1/2), rounds t to 2 significant bits, ties to even; below 1 to halves.
// Then the integer below M's exponent counts last places, off by the 2 that turns it, together
// with the exponent, into the code.
template <typename F>
GRADFERRY_LANE Element<F> encode_element(F v, F scale, F reciprocal) {
  using U = BitsOf<F>;
  const F t = minimum(from_bits(magnitude_bits(v)) * reciprocal, F(6.0f));
  const U exponent = bits(maximum(t, F(1.0f))) & U(kInfinityBits);
  const F m = from_bits(exponent + U((22u << 23) + 2u));
  const F sum = t + m;
  const F rounded = sum - m;
  const U code = ((exponent >> 22) + bits(sum)) & U(7u);
  const U sign = select(rounded > F(0.0f), bits(v) & U(kSignBit), U(0u));
  return {code | (sign >> 28), from_bits(bits(rounded * scale) | sign)};
}

// The value of each code, before its scale.
inline constexpr float kCodeValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4
