// A bf16 scale per block of 128 elements: the part of the format that codecs with such scales
// share.
//
// A block is the unit of such a codec. Its scale is one of
//   0                      the zero block: every element is +0
//   a positive normal bf16 the scale
//   the canonical NaN      a number of the block was not finite: every element is NaN
// and any other pattern is corrupt. In the first and the last case, codes have no meaning.
#pragma once

#include "kernels/common/conversions.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::block_scale {

inline constexpr uint32_t kBlock = 128;
inline constexpr uint32_t kZero = 0;
inline constexpr uint32_t kSmallest = 0x0080u;  // 2^-126
inline constexpr uint32_t kLargest = 0x7f7fu;   // the largest finite bf16
inline constexpr uint32_t kNonFinite = kNanBits >> 16;

GRADFERRY_LANE constexpr uint32_t num_blocks(uint32_t num_elements) {
  return (num_elements + kBlock - 1) / kBlock;
}

// The scale nearest to y >= 0, ties to even; kZero where that is not normal.
template <typename F>
GRADFERRY_LANE BitsOf<F> nearest(F y) {
  using U = BitsOf<F>;
  const U scale = float_to_bf16(y);
  return select(scale >= U(kSmallest), scale, U(kZero));
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::block_scale
