// q8: 8-bit integers in -127 .. 127, and a bf16 scale per block of 128.
// The byte format and arithmetic of docs/reference/wire_format.md, section "q8", once for every
// target.
//
//   value = code * scale
// code has 7 significant bits and scale 8, so the product is exact: no rounding, and no fused
// multiply-add, can make residuals differ between targets.
#pragma once

#include "kernels/common/block_scale.h"
#include "kernels/common/codec_parts.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q8 {

inline constexpr uint32_t kBlock = block_scale::kBlock;
inline constexpr uint32_t kBrokenCode = 0x80u;      // -128, which no encoder writes
inline constexpr uint32_t kLargestScale = 0x7c01u;  // 129/128 * 2^121: 127 times that is finite

// Codes are stored for whole chunks of 16 elements.
GRADFERRY_LANE uint32_t scales_offset(uint32_t num_elements) {
  return (num_elements + 15) / 16 * 16;
}
GRADFERRY_LANE uint32_t payload_bytes(uint32_t num_elements, ScalarType, Stage,
                                      const CodecOptions&) {
  return round_up(scales_offset(num_elements) + 2 * block_scale::num_blocks(num_elements),
                  kPayloadAlignment);
}

template <typename F>
struct BlockScale {
  BitsOf<F> code;  // the bf16 pattern
  F scale;
  F reciprocal;  // 1 / scale, or 0
};

// The scale of a finite block whose largest magnitude is `largest`; at most kLargestScale.
template <typename F>
GRADFERRY_LANE BlockScale<F> scale_of(F largest) {
  using U = BitsOf<F>;
  const U code = block_scale::nearest(largest / F(127.0f));
  const F scale = bf16_to_float(code);
  return {code, scale, select(code == U(block_scale::kZero), F(0.0f), F(1.0f) / scale)};
}

template <typename F>
struct Element {
  BitsOf<F> code;  // 8 bits, two's complement
  F value;         // what the code decodes to
};

// Rounds v / scale to an integer, ties to even. No clamp: a scale is at most 2^-8 below
// largest/127, so a quotient is at most 127 * (1 + 2^-8) = 127.496 and some roundings of 2^-24. In
// the sum, last places are ones and 2^23 + 2^22 is a multiple of 256: the code is its low byte.
template <typename F>
GRADFERRY_LANE Element<F> encode_element(F v, F scale, F reciprocal) {
  const F magic(0x1.8p23f);
  const F sum = v * reciprocal + magic;
  return {bits(sum) & BitsOf<F>(0xffu), (sum - magic) * scale};
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q8
