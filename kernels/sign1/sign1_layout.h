// sign1: the sign of each element, and the mean magnitude of each block of 128 as a bf16 scale.
// The byte format and arithmetic of docs/reference/wire_format.md, section "sign1", once for every
// target.
//
//   value = scale with the sign of the element
// The mean is the scale with the least squared error. Compression by sign and mean: 1-bit SGD
// (Seide et al. 2014), with error feedback a contraction (Karimireddy et al. 2019).
#pragma once

#include "kernels/common/block_scale.h"
#include "kernels/common/codec_parts.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::sign1 {

inline constexpr uint32_t kBlock = block_scale::kBlock;

// Signs are stored for whole chunks of 16 elements, so that scales lie at even addresses.
GRADFERRY_LANE uint32_t scales_offset(uint32_t num_elements) {
  return (num_elements + 15) / 16 * 2;
}
GRADFERRY_LANE uint32_t payload_bytes(uint32_t num_elements, ScalarType, Stage,
                                      const CodecOptions&) {
  return round_up(scales_offset(num_elements) + 2 * block_scale::num_blocks(num_elements),
                  kPayloadAlignment);
}

// What an element adds to the sum of its block: 1/128 of its magnitude, so that no sum of 128
// overflows. The sum is then not finite exactly if one of the elements is not: NaN and infinity
// survive additions of numbers that are not negative.
template <typename F>
GRADFERRY_LANE F summand(F v) {
  return from_bits(magnitude_bits(v)) * F(1.0f / kBlock);
}

// The scale of a finite block, given the sum of its summands and the share of its 128 places that
// hold elements.
template <typename F>
GRADFERRY_LANE BitsOf<F> scale_of(F sum, F share) {
  const F largest = from_bits(BitsOf<F>(block_scale::kLargest << 16));
  return block_scale::nearest(minimum(sum / share, largest));
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::sign1
