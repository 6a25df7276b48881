// The sum of a block over ranks with one transform for all of them, on CPU.
//
// All ranks flip the same signs, and the transform is linear. So one transform does for all ranks
// wherever no sum on the way is rounded, whatever its order: scales are integers in units of the
// last place of the smallest, and with them codes, coordinates and elements. No sum of some ranks'
// terms at an element, or of some of its coordinates, exceeds sqrt(128) times the norm of the sums
// of magnitudes; below 2^24 all are exact in fp32, and finite while the unit is at most 2^104. Only
// the sign of a sum that is zero depends on the ranks: such a block, and one that is not finite or
// may round or overflow, is summed in rank order.
#pragma once

#include "kernels/rht/rht_codes.h"
#include "kernels/rht/rht_transform.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht {

inline constexpr uint32_t kMostRanks = 32;               // whose sum is transformed at once
inline constexpr uint32_t kTooLargeScale = 0x77800000u;  // 2^112: its last place is 2^105

struct RankBlock {
  const std::byte* codes;
  uint32_t scale;  // as fp32 bits
};

// The power of two that is the last place of the smallest scale, as fp32 bits; 0 where scales do
// not allow exact sums.
inline uint32_t common_unit(const RankBlock* ranks, uint32_t num_ranks) {
  uint32_t smallest = ~0u;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    const uint32_t scale = ranks[rank].scale;
    if (scale == 0) continue;
    if (scale < kSmallestScale || scale >= kTooLargeScale) return 0;
    smallest = scale < smallest ? scale : smallest;
  }
  const uint32_t exponent = smallest >> 23;
  constexpr uint32_t kLastPlaces = 7;  // of a scale below its first
  return exponent > 255 || exponent <= kLastPlaces ? 0 : (exponent - kLastPlaces) << 23;
}

// Calls sink(i, s) for a block of `num_ranks` ranks. Returns whether the sums are right.
template <uint32_t kBits, typename Sink>
GRADFERRY_LANE bool sum_transformed(const RankBlock* ranks, uint32_t num_ranks,
                                    const uint32_t* words, Sink sink) {
  const uint32_t unit = common_unit(ranks, num_ranks);
  if (unit == 0) return false;
  const float per_unit = from_bits((254u << 23) - unit);
  alignas(64) float sums[kBlock] = {}, magnitudes[kBlock] = {};
  float scales = 0.0f;
  for (uint32_t rank = 0; rank < num_ranks; ++rank) {
    const float scale = from_bits(ranks[rank].scale) * per_unit;
    scales = scales + scale;
    add_codes<kBits>(ranks[rank].codes, scale, sums, magnitudes);
  }
  const float energy =
      block_sum([&](uint32_t i) { return load(magnitudes + i) * load(magnitudes + i); });
  if (!(scales < 0x1p17f && energy < 0x1.fffp40f)) return false;
  alignas(64) float back[kBlock];
  transform_groups_back(sums, back);
  U32 smallest_inverted(0u);
  finish_block(back, unit, words, [&](uint32_t i, F32 value) {
    smallest_inverted = maximum(smallest_inverted, magnitude_bits(value) ^ U32(~0u));
    sink(i, value);
  });
  return reduce_maximum(smallest_inverted) != ~0u;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht
