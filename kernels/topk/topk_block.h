// Choosing and finding the kept elements of a tile, by a whole block of threads.
//
// Magnitudes compare as floats: none is NaN, and the order of finite floats that are not negative
// is that of their bits. The k-th largest is searched for in the bits, each step counting over the
// registers of all threads; the search ends as soon as exactly k are not below, after some 8 steps
// on gradients. What is chosen is then ranked in the order of elements, which is that of warps,
// rows, lanes and quads (kernels/cuda/slice.h), by scans over lanes and warps.
#pragma once

#include "kernels/cuda/slice.h"
#include "kernels/topk/topk_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk {

struct WarpTotals {
  uint32_t of_warp[2][kTileWarps];  // two, so that one barrier per sum is enough
  float magnitudes[kTileWarps];
};

// The sum over all threads, in all of them. `turn` alternates from call to call.
GRADFERRY_DEVICE uint32_t block_sum(const Slice& slice, WarpTotals& totals, uint32_t turn,
                                    uint32_t x) {
  x = __reduce_add_sync(kAllLanes, x);
  if (slice.lane == 0) totals.of_warp[turn % 2][slice.warp] = x;
  __syncthreads();
  uint32_t sum = 0;
  GRADFERRY_UNROLL
  for (uint32_t w = 0; w < kTileWarps; ++w) sum += totals.of_warp[turn % 2][w];
  return sum;
}

// Elements above `key` are kept, and of those at it the first `ties`.
struct Cut {
  uint32_t key;
  uint32_t ties;
};

// `largest`: the bits of the lane's largest magnitude. The first key tried is a guess: the k-th
// largest of n exponentially distributed magnitudes is ln(n / k) times the mean; of gradients,
// whose tails are lighter, some 0.7 of that. The next ones are where a straight line between both
// ends' counts reaches k, an end that stays twice counting half (the Illinois method); after three
// that did not halve the range, the middle. Any key gives the same cut, whatever is rounded.
GRADFERRY_DEVICE Cut find_cut(const Slice& slice, WarpTotals& totals, const float* v, uint32_t k,
                              uint32_t largest) {
  float sum = 0.0f;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) sum = sum + from_bits(magnitude_bits(v[j]));
  for (int lanes = 1; lanes < static_cast<int>(kWarpLanes); lanes *= 2) {
    sum = sum + __shfl_xor_sync(kAllLanes, sum, lanes);
  }
  largest = warp_maximum(largest);
  if (slice.lane == 0) {
    totals.of_warp[1][slice.warp] = largest;  // the search begins with the other buffer
    totals.magnitudes[slice.warp] = sum;
  }
  __syncthreads();
  sum = 0.0f;
  for (uint32_t w = 0; w < kTileWarps; ++w) {
    largest = maximum(largest, totals.of_warp[1][w]);
    sum = sum + totals.magnitudes[w];
  }
  // A float's bits are nearly its binary logarithm.
  constexpr auto kAll = static_cast<float>(kTileElements);
  const uint32_t log = bits(kAll) - bits(static_cast<float>(k));
  const uint32_t guess = bits(sum * (static_cast<float>(log) * 0x1p-24f / kAll));

  // More than k magnitudes are not below `low`, fewer than k, `above`, not below `high`.
  uint32_t low = 0, high = largest + 1, above = 0, slow = 0;
  float from_low = static_cast<float>(kTileElements - k), from_high = static_cast<float>(k);
  bool raised = false;  // in the last step
  for (uint32_t turn = 0; high - low > 1; ++turn) {
    const uint32_t range = high - low;
    const float line = static_cast<float>(range) * (from_low / (from_low + from_high));
    const bool halves = slow == 3;
    uint32_t step = turn == 0 ? guess : halves ? range / 2 : static_cast<uint32_t>(line);
    step = step == 0 ? 1 : step < range ? step : range - 1;
    const uint32_t key = low + step;
    uint32_t count = 0;
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) {
      count += from_bits(magnitude_bits(v[j])) >= from_bits(key) ? 1 : 0;
    }
    count = block_sum(slice, totals, turn, count);
    if (count == k) return {key - 1, 0};
    const float stays = (count > k) == raised ? 0.5f : 1.0f;
    raised = count > k;
    low = raised ? key : low;
    high = raised ? high : key;
    above = raised ? above : count;
    from_low = raised ? static_cast<float>(count - k) : from_low * stays;
    from_high = raised ? from_high * stays : static_cast<float>(k - count);
    slow = high - low <= range / 2 || halves ? 0 : slow + 1;
  }
  return {low, k - above};
}

// Which of the lane's elements are kept, and which place the first of each quad has among all.
struct Ranks {
  uint32_t kept;  // bit j: element j
  uint32_t first[kRows];

  GRADFERRY_DEVICE uint32_t quad(uint32_t row) const { return kept >> (kQuad * row) & 15; }
};

// The sum over the lanes before this one.
GRADFERRY_DEVICE uint32_t exclusive_warp_sum(const Slice& slice, uint32_t x) {
  uint32_t sum = x;
  GRADFERRY_UNROLL
  for (uint32_t lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, sum, lanes);
    if (slice.lane >= lanes) sum += other;
  }
  return sum - x;
}

// The sum over the threads before this one, and that over all. Needs a barrier since the last use
// of `totals`.
struct Scanned {
  uint32_t before, total;
};
GRADFERRY_DEVICE Scanned exclusive_sum(const Slice& slice, WarpTotals& totals, uint32_t x) {
  const uint32_t in_warp = exclusive_warp_sum(slice, x);
  if (slice.lane == kWarpLanes - 1) totals.of_warp[0][slice.warp] = in_warp + x;
  __syncthreads();
  Scanned result{in_warp, 0};
  GRADFERRY_UNROLL
  for (uint32_t w = 0; w < kTileWarps; ++w) {
    const uint32_t total = totals.of_warp[0][w];
    result.before += w < slice.warp ? total : 0;
    result.total += total;
  }
  return result;
}

// Counts go in pairs: those above the cut in the low half of a word, those at it in the high half.
GRADFERRY_DEVICE Ranks rank_elements(const Slice& slice, WarpTotals& totals, const float* v,
                                     const Cut& cut) {
  uint32_t above = 0, tied = 0, before[kRows], sum = 0;
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    GRADFERRY_UNROLL
    for (uint32_t j = kQuad * row; j < kQuad * row + kQuad; ++j) {
      above |= (magnitude_bits(v[j]) > cut.key ? 1u : 0u) << j;
      tied |= (cut.ties != 0 && magnitude_bits(v[j]) == cut.key ? 1u : 0u) << j;
    }
    const uint32_t quad_above = above >> (kQuad * row) & 15, quad_tied = tied >> (kQuad * row) & 15;
    const uint32_t counts = static_cast<uint32_t>(__popc(quad_above) | __popc(quad_tied) << 16);
    const uint32_t before_lane = exclusive_warp_sum(slice, counts);
    before[row] = sum + before_lane;
    sum += __shfl_sync(kAllLanes, before_lane + counts, kWarpLanes - 1);
  }
  // The search's last sum may still be being read.
  __syncthreads();
  if (slice.lane == 0) totals.of_warp[0][slice.warp] = sum;
  __syncthreads();
  uint32_t before_warp = 0;
  for (uint32_t w = 0; w < slice.warp; ++w) before_warp += totals.of_warp[0][w];

  Ranks ranks;
  ranks.kept = above;
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t counts = before[row] + before_warp;
    uint32_t ties_before = counts >> 16;
    ranks.first[row] = (counts & 0xffffu) + (ties_before < cut.ties ? ties_before : cut.ties);
    GRADFERRY_UNROLL
    for (uint32_t j = kQuad * row; j < kQuad * row + kQuad; ++j) {
      if ((tied >> j & 1) == 0) continue;
      if (ties_before < cut.ties) ranks.kept |= 1u << j;
      ++ties_before;
    }
  }
  return ranks;
}

// Calls f(j, rank) for the kept elements of the lane.
template <typename F>
GRADFERRY_DEVICE void for_kept(const Ranks& ranks, F f) {
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t rank = ranks.first[row];
    GRADFERRY_UNROLL
    for (uint32_t j = kQuad * row; j < kQuad * row + kQuad; ++j) {
      if ((ranks.kept >> j & 1) != 0) f(j, rank++);
    }
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk
