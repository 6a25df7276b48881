// Choosing the k largest magnitudes of a tile, exactly, on CPU.
//
// Magnitudes compare as integers (`key`), ties go to the lower position. Sorting is not needed: a
// bound from below leaves few candidates, among which the k-th largest is searched for.
//   1. Cut the tile into G >= 2k strided groups and take each group's maximum. The k-th largest
//      maximum has at least k elements not below it, in k different groups. Search the key for
//      it, roughly: any bound with k to 9/8 k maxima above it will do.
//   2. Collect the elements not below the bound, in order: the candidates, a little more than k.
//   3. Search their keys until exactly k are not below, or until only ties are left to cut.
// One pass over all elements each for 1 and 2; the rest is proportional to k.
#pragma once

#include "kernels/common/compress.h"
#include "kernels/topk/topk_positions.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk {

// The chosen elements in increasing order of position. Entries from k on are scratch: writes go by
// whole vectors, and numbers are padded with zeros to whole blocks.
struct Chosen {
  alignas(64) uint32_t positions[kPositionsRoom];
  alignas(64) float values[kMostKept + 2 * e2m1::kBlock];
};

// At least `k` keys are not below `key`, in fact `count`; fewer than k, `above`, are above it if
// count is more than k.
struct Cut {
  uint32_t key;
  uint32_t count;
  uint32_t above;
};

// How many of the keys of `n` numbers are at least `key`; n is a multiple of kLanes.
GRADFERRY_LANE uint32_t count_at_least(const uint32_t* numbers, uint32_t n, uint32_t key) {
  const U32 bound(key);
  U32 count(0u);
  for (uint32_t i = 0; i < n; i += kLanes) {
    count = add_where((load(numbers + i) & U32(kMagnitudeBits)) >= bound, count);
  }
  return reduce_sum(count);
}

// What falls evenly as keys rise, for a guess of the key at which a count is reached: among all
// maxima the count itself, in the tail of the largest its logarithm, here of 2 count + 1.
struct EvenCounts {
  GRADFERRY_LANE static uint32_t height(uint32_t count) { return count; }
};
struct TailCounts {
  GRADFERRY_LANE static uint32_t height(uint32_t count) {
    return bits(static_cast<float>(2 * count + 1));  // a logarithm by pieces of straight lines
  }
};

// Raises `cut` while more than `enough` numbers are left, keeping at least k. All keys are below
// `high`. A range is cut where the guess lies, and after a guess that did not halve it in halves.
template <typename Counts>
GRADFERRY_LANE Cut search(const uint32_t* numbers, uint32_t n, uint32_t k, uint32_t enough, Cut cut,
                          uint32_t high) {
  const uint32_t wanted = Counts::height(k + (enough - k) / 2);
  bool halves = false;
  while (cut.count > enough && high - cut.key > 1) {
    const uint32_t range = high - cut.key;
    uint32_t step = range / 2;
    if (!halves) {
      const uint32_t top = Counts::height(cut.count);
      const uint64_t guess = uint64_t{range} * (top - wanted) / (top - Counts::height(cut.above));
      step = guess == 0 ? 1 : guess < range ? static_cast<uint32_t>(guess) : range - 1;
    }
    const uint32_t middle = cut.key + step;
    const uint32_t count = count_at_least(numbers, n, middle);
    const bool is_bound = count >= k;
    cut.above = is_bound ? cut.above : count;
    high = is_bound ? high : middle;
    cut.count = is_bound ? count : cut.count;
    cut.key = is_bound ? middle : cut.key;
    halves = !halves && high - cut.key > range / 2;
  }
  return cut;
}

GRADFERRY_LANE uint32_t num_groups(uint32_t k) {
  uint32_t groups = 256;
  while (groups < 2 * k) groups *= 2;
  return groups;
}
inline constexpr uint32_t kMostGroups = 2 * kMostKept;

// Maxima of the groups i, i + G, i + 2G, ... of v[0 .. padded), as keys.
GRADFERRY_LANE void group_maxima(const float* v, uint32_t padded, uint32_t groups,
                                 uint32_t* maxima) {
  for (uint32_t group = 0; group < groups; group += kLanes) {
    U32 largest = magnitude_bits(load(v + group));
    for (uint32_t i = group + groups; i < padded; i += groups) {
      largest = maximum(largest, magnitude_bits(load(v + i)));
    }
    store(maxima + group, largest);
  }
}

struct Candidates {
  alignas(64) uint32_t numbers[kTileElements + kChunk];  // bits of floats
  alignas(64) uint32_t positions[kTileElements + kChunk];
  uint32_t count;
};

// Calls on_the_way(i) for i = 0, 32, ...
template <typename OnTheWay>
GRADFERRY_LANE void collect(const float* v, uint32_t padded, uint32_t key, Candidates* found,
                            OnTheWay on_the_way) {
  const U32 bound(key);
  U32 position = lane_numbers();
  uint32_t count = 0;
  for (uint32_t i = 0; i < padded; i += kLanes) {
    if (i % 32 == 0) on_the_way(i);
    const Mask chosen = magnitude_bits(load(v + i)) >= bound;
    count += store_chosen(found->positions + count, position, chosen);
    position = position + U32(kLanes);
  }
  found->count = count;
  for (uint32_t j = 0; j < count; ++j) found->numbers[j] = bits(v[found->positions[j]]);
  for (uint32_t i = 0; i < kChunk; ++i) found->numbers[count + i] = 0;
}

// `bits` with only its lowest `count` ones.
GRADFERRY_LANE uint32_t lowest_ones(uint32_t bits, uint32_t count) {
  uint32_t result = 0;
  for (; bits != 0 && count != 0; --count) {
    result |= bits & (0u - bits);
    bits &= bits - 1;
  }
  return result;
}

// The candidates above the cut, and as many of those at the cut as make k.
GRADFERRY_LANE void take(const Candidates& found, uint32_t k, const Cut& cut, Chosen* chosen) {
  const bool cuts_ties = cut.count > k;
  uint32_t ties_left = k - cut.above;
  uint32_t count = 0;
  for (uint32_t i = 0; count < k; i += kLanes) {
    const U32 x = load(found.numbers + i);
    const U32 key = x & U32(kMagnitudeBits);
    Mask taken = key >= U32(cut.key);
    if (cuts_ties) {
      const uint32_t ties = lane_bits(key == U32(cut.key));
      const uint32_t kept = lowest_ones(ties, ties_left);
      ties_left -= static_cast<uint32_t>(__builtin_popcount(kept));
      taken = lanes_of((lane_bits(taken) ^ ties) | kept);
    }
    store_chosen(reinterpret_cast<uint32_t*>(chosen->values) + count, x, taken);
    count += store_chosen(chosen->positions + count, load(found.positions + i), taken);
  }
  for (uint32_t i = k; i < round_up(k, e2m1::kBlock); ++i) chosen->values[i] = 0.0f;
}

// Chooses the k largest of v[0 .. padded). Returns false, having chosen nothing, if one of them is
// not finite. Zeros that pad v never come before an element, since k is at most their number.
// Calls on_the_way(i) for i = 0, 32, ... below padded, so that memory has something to do
// meanwhile.
template <typename OnTheWay>
GRADFERRY_LANE bool choose(const float* v, uint32_t padded, uint32_t k, Chosen* chosen,
                           OnTheWay on_the_way) {
  alignas(64) uint32_t maxima[kMostGroups];
  const uint32_t groups = padded < num_groups(k) ? padded : num_groups(k);
  group_maxima(v, padded, groups, maxima);
  U32 most(0u), least_inverted(0u);
  for (uint32_t i = 0; i < groups; i += kLanes) {
    most = maximum(most, load(maxima + i));
    least_inverted = maximum(least_inverted, load(maxima + i) ^ U32(~0u));
  }
  const uint32_t largest = reduce_maximum(most);
  if (largest >= kInfinityBits) return false;
  const Cut all_groups = {~reduce_maximum(least_inverted), groups, 0};
  const Cut bound = search<EvenCounts>(maxima, groups, k, k + k / 8, all_groups, largest + 1);

  Candidates found;
  collect(v, padded, bound.key, &found, on_the_way);
  const Cut all_found = {bound.key, found.count, 0};
  const uint32_t padded_count = round_up(found.count, kLanes);
  take(found, k, search<TailCounts>(found.numbers, padded_count, k, k, all_found, largest + 1),
       chosen);
  return true;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk
