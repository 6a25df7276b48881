// The transform of rht, there and back, over a block of 128 floats in the L1 cache: vectors meet
// across registers where they lie 16 or more apart, and by split and join where they do not.
#pragma once

#include "kernels/common/conversions.h"
#include "kernels/common/lane_pairs.h"
#include "kernels/rht/rht_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht {

inline constexpr uint32_t kColumn = 16;                      // distance of a column's elements
inline constexpr uint32_t kColumnLength = kBlock / kColumn;  // 8
inline constexpr uint32_t kGroupVectors = kGroup / kLanes;

// The coordinates that vector j of a transformed group holds begin here: coordinates are the
// elements 0 16 1 17 2 18 .. of a group.
constexpr uint32_t coordinate(uint32_t j) {
  return (2 * j % kGroupVectors + 2 * j / kGroupVectors) * kLanes;
}

template <uint32_t k = 0>
GRADFERRY_LANE void butterfly_lanes(F32& a, F32& b) {
  if constexpr ((1u << k) < kLanes) {
    split<k>(a, b);
    butterfly(a, b);
    butterfly_lanes<k + 1>(a, b);
  }
}
template <uint32_t k = 0>
GRADFERRY_LANE void butterfly_lanes_back(F32& a, F32& b) {
  if constexpr ((1u << k) < kLanes) {
    butterfly_lanes_back<k + 1>(a, b);
    butterfly(a, b);
    join<k>(a, b);
  }
}

// Strides kLanes .. 8 of a group.
GRADFERRY_LANE void butterfly_vectors(F32* x) {
  for (uint32_t stride = 1; stride < kGroupVectors / 2; stride *= 2) {
    for (uint32_t j = 0; j < kGroupVectors; ++j) {
      if ((j & stride) == 0) butterfly(x[j], x[j + stride]);
    }
  }
}

// Strides 1, 2, 4, 8 of a group of elements; out: coordinates, in their order.
GRADFERRY_LANE void transform_group(const float* in, float* out) {
  F32 x[kGroupVectors];
  for (uint32_t j = 0; j < kGroupVectors; ++j) x[j] = load(in + j * kLanes);
  for (uint32_t j = 0; j < kGroupVectors / 2; ++j) butterfly_lanes(x[j], x[j + kGroupVectors / 2]);
  butterfly_vectors(x);
  for (uint32_t j = 0; j < kGroupVectors; ++j) store(out + coordinate(j), x[j]);
}

// The inverse of transform_group, times 16. On small integers every order of strides is exact.
GRADFERRY_LANE void transform_group_back(const float* in, float* out) {
  F32 x[kGroupVectors];
  for (uint32_t j = 0; j < kGroupVectors; ++j) x[j] = load(in + coordinate(j));
  butterfly_vectors(x);
  for (uint32_t j = 0; j < kGroupVectors / 2; ++j) {
    butterfly_lanes_back(x[j], x[j + kGroupVectors / 2]);
  }
  for (uint32_t j = 0; j < kGroupVectors; ++j) store(out + j * kLanes, x[j]);
}

// Strides 16, 32, 64 of a block. Calls take(i, x) with the vector of elements from i on.
template <typename Give, typename Take>
GRADFERRY_LANE void butterfly_columns_of_block(Give give, Take take) {
  for (uint32_t first = 0; first < kColumn; first += kLanes) {
    F32 x[kColumnLength];
    for (uint32_t k = 0; k < kColumnLength; ++k) x[k] = give(first + k * kColumn);
    butterfly_columns(x);
    for (uint32_t k = 0; k < kColumnLength; ++k) take(first + k * kColumn, x[k]);
  }
}

// Adds vectors n/2 apart, then n/4, ... n: a power of two. With halving_sum of the result, that is
// the sum over all lanes in the order of block_sum.
GRADFERRY_LANE F32 sum_vectors(F32* x, uint32_t n) {
  for (uint32_t half = n / 2; half > 0; half /= 2) {
    for (uint32_t i = 0; i < half; ++i) x[i] = x[i] + x[i + half];
  }
  return x[0];
}

// The sum of term(i) over a block: elements 64 apart are added, then 32, 16, .., 1.
template <typename Term>
GRADFERRY_LANE float block_sum(Term term) {
  F32 sum[kBlock / 2 / kLanes];
  for (uint32_t i = 0; i < kBlock / 2; i += kLanes) {
    sum[i / kLanes] = term(i) + term(i + kBlock / 2);
  }
  return halving_sum(sum_vectors(sum, kBlock / 2 / kLanes));
}

// From codebook values by coordinate to elements, but for the strides that finish_block adds.
GRADFERRY_LANE void transform_groups_back(const float* z, float* back) {
  for (uint32_t group = 0; group < kBlock; group += kGroup) {
    transform_group_back(z + group, back + group);
  }
}

// Calls sink(i, value) with the decoded elements of a block whose groups are transformed back.
// scale: fp32 bits.
template <typename Sink>
GRADFERRY_LANE void finish_block(const float* back, uint32_t scale, const uint32_t* signs,
                                 Sink sink) {
  const F32 s(from_bits(scale));
  butterfly_columns_of_block([&](uint32_t i) { return load(back + i); },
                             [&](uint32_t i, F32 sum) { sink(i, sum * flip_signs(s, signs, i)); });
}

// Whether every decoded element of the block is finite.
[[gnu::noinline]] inline bool is_finite_block(const float* back, uint32_t scale,
                                              const uint32_t* signs) {
  U32 largest(0u);
  finish_block(back, scale, signs,
               [&](uint32_t, F32 value) { largest = maximum(largest, magnitude_bits(value)); });
  return reduce_maximum(largest) < kInfinityBits;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht
