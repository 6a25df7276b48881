// E2M1: 4-bit codes, an E4M3 scale per block of 32, a power of two per group of up to 1024. The
// arithmetic of docs/reference/wire_format.md, section "q4", once for every target and every codec
// that has such groups; where their bytes lie is up to the codec.
//
//   value = code * S,  S = scale * 2^k
// code has 2 significant bits and scale 4, so the product is exact: no rounding, and no fused
// multiply-add, can make residuals differ between targets.
#pragma once

#include "kernels/common/conversions.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::e2m1 {

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
  F half_scale;    // S / 2, or 0
  F reciprocal;    // of that: 2 / S, or 0
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
  const F half_scale = from_bits(bits(s) + U(static_cast<uint32_t>(k - 1) << 23));
  const U code = (bits(s) >> 20) - U((127u - 7u) << 3);
  return {select(is_zero, U(0u), code), select(is_zero, F(0.0f), half_scale),
          select(is_zero, F(0.0f), F(1.0f) / half_scale)};
}

// S of a valid scale byte; 0 of byte 0.
template <typename U>
GRADFERRY_LANE auto decode_scale(U code, int32_t k) {
  const U exponent = U(static_cast<uint32_t>(k + (127 - 7)) << 23);
  return from_bits(select(code == U(0u), U(0u), (code << 20) + exponent));
}

// Twice the E2M1 value nearest to v / S, with its sign: 0, 1, 2, 3, 4, 6, 8 or 12; v is finite.
// Twice, so that values are integers: dividing by S / 2 and multiplying by it is as exact as with
// S.
//
// x = 2 v / S has 2 significant bits to keep, or less below 2, where halves of S end. Adding M,
// whose last place is half of x's power of two (at least 1), rounds x so, ties to even; the half in
// M = 1.5 * 2^(e + 22) keeps negative x in M's binade. A zero comes out as +0, as code 0 wants.
// x needs no limit: a scale of 4 significant bits leaves |x| <= 2 * 6.375 (2 * 6.4 where it is
// capped), which rounds to 12.
template <typename F>
GRADFERRY_LANE F nearest_doubled(F v, F reciprocal) {
  using U = BitsOf<F>;
  const F x = v * reciprocal;
  const U power = maximum(bits(x) & U(kInfinityBits), bits(F(2.0f)));
  const F m = from_bits(power + U((22u << 23) | 0x400000u));
  return (x + m) - m;
}

// The code of a doubled value q, at index q & 31: for vectors that look up 32 numbers, and for
// plain code. The same for magnitudes alone.
inline constexpr uint32_t kCodeOfDoubled[32] = {0, 1, 2,  3, 4,  0, 5,  0,  6,  0,  0,
                                                0, 7, 0,  0, 0,  0, 0,  0,  0,  15, 0,
                                                0, 0, 14, 0, 13, 0, 12, 11, 10, 9};
inline constexpr uint8_t kCodeOfMagnitude[16] = {0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7, 0, 0, 0};

// The value of each code without sign, before its scale.
inline constexpr float kCodeValues[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::e2m1
