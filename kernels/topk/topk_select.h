// Choosing the k largest magnitudes of a tile, exactly, on CPU.
//
// Magnitudes compare as integers (`key`), ties go to the lower position. Sorting is not needed: a
// bound from below leaves few candidates, among which the k-th largest is searched for.
//   1. Cut the tile into G >= 2k strided groups and take each group's maximum. The k-th largest
//      maximum has at least k elements not below it, in k different groups. Search the key for
//      it, roughly: any bound with k to 9/8 k maxima above it will do.
//   2. Collect the elements not below the bound, in order: the candidates, a little more than k.
//   3. Search their keys until exactly k are not below, or until only ties are left to cut.
// One pass over all elements each for 1 and 2; the rest is proportional to k. Where fewer than k
// groups have anything but zeros, as in residuals of what others have chosen already, the
// candidates are all that is not zero, and the first zeros fill what is left of k.
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

// At least `k` keys are not below `key`, in fact `count`; fewer than k, `above`, are not below
// `high`.
struct Cut {
  uint32_t key;
  uint32_t count;
  uint32_t high;
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

// Raises `cut` while more than `enough` numbers are left, keeping at least k. All keys are below
// `high`. The next key is where a straight line between both ends reaches what is wanted, but not
// more than `reach` from the lower end, which is where the numbers are dense; after one that did
// not halve the range, or ended at `reach`, the range or the reach is halved or widened.
GRADFERRY_LANE Cut search(const uint32_t* numbers, uint32_t n, uint32_t k, uint32_t enough, Cut cut,
                          uint32_t reach) {
  const uint32_t wanted = k + (enough - k) / 2;
  bool halves = false;
  while (cut.count > enough && cut.high - cut.key > 1) {
    const uint32_t range = cut.high - cut.key;
    const uint64_t guess = uint64_t{range} * (cut.count - wanted) / (cut.count - cut.above);
    uint32_t step = halves ? range / 2 : guess == 0 ? 1 : static_cast<uint32_t>(guess);
    step = step < reach ? step : reach;
    const uint32_t middle = cut.key + step;
    const uint32_t count = count_at_least(numbers, n, middle);
    const bool is_bound = count >= k;
    cut.above = is_bound ? cut.above : count;
    cut.high = is_bound ? cut.high : middle;
    cut.count = is_bound ? count : cut.count;
    cut.key = is_bound ? middle : cut.key;
    if (is_bound && step == reach) reach = reach < kInfinityBits / 16 ? 16 * reach : kInfinityBits;
    halves = !halves && cut.high - cut.key > range / 2;
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
  if (static_cast<uint32_t>(__builtin_popcount(bits)) <= count) return bits;
  uint32_t result = 0;
  for (; count != 0; --count) {
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

// The candidates, fewer than k and all that is not zero, and as many of the first zeros as make k.
GRADFERRY_LANE void take_with_zeros(const float* v, const Candidates& found, uint32_t k,
                                    Chosen* chosen) {
  const uint32_t zeros = k - found.count;
  auto* values = reinterpret_cast<uint32_t*>(chosen->values);
  uint32_t zeros_left = zeros, count = 0;
  U32 position = lane_numbers();
  for (uint32_t i = 0; zeros_left != 0; i += kLanes) {
    const U32 x = bits(load(v + i));
    const uint32_t zero = lane_bits((x & U32(kMagnitudeBits)) == U32(0u));
    const uint32_t kept = lowest_ones(zero, zeros_left);
    zeros_left -= static_cast<uint32_t>(__builtin_popcount(kept));
    const Mask taken = lanes_of(~zero | kept);
    store_chosen(values + count, x, taken);
    count += store_chosen(chosen->positions + count, position, taken);
    position = position + U32(kLanes);
  }
  for (uint32_t i = count; i < k; i += kLanes) {
    store(values + i, load(found.numbers + i - zeros));
    store(chosen->positions + i, load(found.positions + i - zeros));
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
  Cut bound = {~reduce_maximum(least_inverted), groups, largest + 1, 0};
  if (bound.key == 0) bound = {1, count_at_least(maxima, groups, 1), largest + 1, 0};
  if (bound.count > k) bound = search(maxima, groups, k, k + k / 8, bound, kInfinityBits);

  Candidates found;
  collect(v, padded, bound.key, &found, on_the_way);
  if (found.count < k) {
    take_with_zeros(v, found, k, chosen);
    return true;
  }
  const Cut all_found = {bound.key, found.count, largest + 1, 0};
  const uint32_t padded_count = round_up(found.count, kLanes);
  const uint32_t reach = bound.high - bound.key;
  take(found, k, search(found.numbers, padded_count, k, k, all_found, reach), chosen);
  return true;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk
