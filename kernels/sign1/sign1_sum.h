// Sums over ranks of signs times scales, as integers of 16 bits.
//
// A scale has 8 significant bits. In units of the last place of the smallest of a block's scales
// all of them are integers m, and so is every sum of some of them with any signs. While all m
// together stay below 2^15 such sums are exact in fp32, in whatever order, if that of all scales is
// finite: the sum in rank order is the sum of all scales less twice those of the ranks that say
// minus. A zero comes out as +0, as from x + (-x); a zero block, m = 0, adds nothing whatever its
// signs.
//
// For AVX-512 alone, where the bits of a payload are the lanes of a masked subtraction.
#pragma once

#include "kernels/common/compress.h"
#include "kernels/common/scaled_blocks.h"
#include "kernels/sign1/sign1_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::sign1 {

inline constexpr uint32_t kFewestRanks = 3;  // below, finding the integers costs more than it saves
inline constexpr uint32_t kMostRanks = 32;
inline constexpr uint32_t kHalfwords = 2 * kLanes;  // of a vector of 16-bit integers

// The scales of a unit's blocks as integers. Slots from the number of blocks on are zero blocks.
struct IntegerScales {
  alignas(64) uint32_t twice[kMostRanks][kSlots];  // the lower halves count
  alignas(64) uint32_t total[kSlots];              // likewise
  alignas(64) float unit[kSlots];

  // scales_by_rank: payloads of the ranks, at the scales of the unit. Returns whether every scale
  // is that of a finite block and all sums are exact.
  GRADFERRY_LANE bool find(const std::byte* const* scales_by_rank, uint32_t num_ranks) {
    bool exact = true;
    for (uint32_t b = 0; b < kSlots; b += kLanes) {
      U32 pattern[kMostRanks];
      U32 largest(0u), below_top(0u);  // pattern; 255 less the smallest exponent
      for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        alignas(64) uint16_t patterns[kSlots] = {};
        __builtin_memcpy(patterns, scales_by_rank[rank], kUnitBlocks * sizeof(uint16_t));
        const U32 p = load_halfwords(patterns + b);
        largest = maximum(largest, p);
        below_top =
            maximum(below_top, select(p == U32(block_scale::kZero), U32(0u), U32(255u) - (p >> 7)));
        pattern[rank] = p;
      }
      const U32 exponent = U32(255u) - below_top;
      exact &= all((largest <= U32(block_scale::kLargest)) & (exponent >= U32(kSmallestExponent)));
      store(unit + b, from_bits((exponent - U32(7u)) << 23));
      const F32 per_unit = from_bits((U32(254u + 7u) - exponent) << 23);
      F32 sum(0.0f);
      for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        const F32 m = bf16_to_float(pattern[rank]) * per_unit;
        sum = sum + m;
        store(twice[rank] + b, bits(m + m + F32(0x1p23f)));
      }
      exact &= all(bits(sum) <= U32(kMostSum)) && !any(is_not_finite(sum * load(unit + b)));
      store(total + b, bits(sum + F32(0x1p23f)));
    }
    return exact;
  }

 private:
  static constexpr uint32_t kSmallestExponent = 8;   // so that the unit is a normal number
  static constexpr uint32_t kMostSum = 0x46fffe00u;  // 2^15 - 1
};

// Vectors of kHalfwords elements. subtract_where: s - x in the lanes whose bits are set.
using I16 = __m512i;
GRADFERRY_LANE I16 broadcast_halfword(uint32_t x) {
  return _mm512_set1_epi16(static_cast<int16_t>(x));
}
GRADFERRY_LANE I16 subtract_where(const std::byte* bits, I16 s, I16 x) {
  uint32_t lanes;
  __builtin_memcpy(&lanes, bits, sizeof(lanes));
  return _mm512_mask_sub_epi16(s, lanes, s, x);
}
// Calls sink with the elements i .. i + kHalfwords - 1, times `unit`.
template <typename Sink>
GRADFERRY_LANE void give_halfwords(I16 s, F32 unit, uint32_t i, Sink sink) {
  const auto widen = [&](__m256i half) {
    return F32(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(half)));
  };
  sink(i, widen(_mm512_castsi512_si256(s)) * unit);
  sink(i + kLanes, widen(_mm512_extracti64x4_epi64(s, 1)) * unit);
}

// Calls sink(i, s) with the sums of a unit's signed scales in rank order. signs: those of each
// rank.
template <typename Sink>
[[gnu::noinline]] void sum_integers(const IntegerScales& scales, const std::byte* const* signs,
                                    uint32_t num_ranks, uint32_t num_blocks, const Ahead& ahead,
                                    Sink sink) {
  constexpr uint32_t kVectors = kBlock / kHalfwords;
  for (uint32_t block = 0; block < num_blocks; ++block) {
    I16 s[kVectors];
    for (I16& x : s) x = broadcast_halfword(scales.total[block]);
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      const std::byte* bits = signs[rank] + block * (kBlock / 8);
      if (block % 4 == 0) ahead.prefetch_payload(bits);
      const I16 twice = broadcast_halfword(scales.twice[rank][block]);
      for (uint32_t k = 0; k < kVectors; ++k) {
        s[k] = subtract_where(bits + k * kHalfwords / 8, s[k], twice);
      }
    }
    const F32 unit(scales.unit[block]);
    for (uint32_t k = 0; k < kVectors; ++k) {
      give_halfwords(s[k], unit, block * kBlock + k * kHalfwords, sink);
    }
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::sign1
