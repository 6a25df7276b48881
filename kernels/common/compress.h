// Vectors whose lanes move: the chosen lanes of a vector gathered at its front, and back.
//
//   lane_bits(m)        bit l is 1 where lane l of m is true
//   lanes_of(bits)      the other way; bits above kLanes are ignored
//   add_where(m, c)     c + 1 where m is true, else c
//   reduce_sum(x)       of all lanes
//   store_chosen(p, x, m)  the lanes of x where m is true, in order, from p on. Returns how many.
//                       Writes all kLanes elements at p: those after the chosen ones are
//                       unspecified
//   expand(x, m)        lane l is the next lane of x, from its first, where m is true, else +0
//   lane_numbers()      0, 1, 2, ...
#pragma once

#include "kernels/common/simd.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

#if defined(GRADFERRY_KERNEL_AVX512)

GRADFERRY_LANE uint32_t lane_bits(Mask m) { return m.v; }
GRADFERRY_LANE Mask lanes_of(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }
GRADFERRY_LANE U32 add_where(Mask m, U32 c) {
  return _mm512_mask_add_epi32(c.v, m.v, c.v, _mm512_set1_epi32(1));
}
GRADFERRY_LANE uint32_t reduce_sum(U32 x) {
  return static_cast<uint32_t>(_mm512_reduce_add_epi32(x.v));
}
// Compressing in a register: some processors compress to memory one lane at a time.
GRADFERRY_LANE uint32_t store_chosen(uint32_t* p, U32 x, Mask m) {
  store(p, U32(_mm512_maskz_compress_epi32(m.v, x.v)));
  return static_cast<uint32_t>(__builtin_popcount(m.v));
}
GRADFERRY_LANE F32 expand(F32 x, Mask m) { return _mm512_maskz_expand_ps(m.v, x.v); }
GRADFERRY_LANE U32 lane_numbers() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

#elif defined(GRADFERRY_KERNEL_AVX2)

// AVX2 has permutations but no compression: byte l of an entry is the lane that goes to lane l.
struct LaneTable {
  uint64_t entry[256];
};
constexpr LaneTable make_compress_table() {
  LaneTable table{};
  for (uint32_t bits = 0; bits < 256; ++bits) {
    int next = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      if ((bits >> lane & 1) != 0) table.entry[bits] |= uint64_t{lane} << (8 * next++);
    }
  }
  return table;
}
constexpr LaneTable make_expand_table() {
  LaneTable table{};
  for (uint32_t bits = 0; bits < 256; ++bits) {
    uint64_t next = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      if ((bits >> lane & 1) != 0) table.entry[bits] |= next++ << (8 * lane);
    }
  }
  return table;
}
inline constexpr LaneTable kCompressTable = make_compress_table();
inline constexpr LaneTable kExpandTable = make_expand_table();

GRADFERRY_LANE uint32_t lane_bits(Mask m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m.v)));
}
GRADFERRY_LANE Mask lanes_of(uint32_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return U32(_mm256_and_si256(U32(bits).v, lane)) == U32(lane);
}
GRADFERRY_LANE U32 add_where(Mask m, U32 c) { return _mm256_sub_epi32(c.v, m.v); }
GRADFERRY_LANE uint32_t reduce_sum(U32 x) {
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x.v), _mm256_extracti128_si256(x.v, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(sum));
}
GRADFERRY_LANE __m256i permutation(uint64_t entry) {
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(entry)));
}
GRADFERRY_LANE uint32_t store_chosen(uint32_t* p, U32 x, Mask m) {
  const uint32_t bits = lane_bits(m);
  store(p, U32(_mm256_permutevar8x32_epi32(x.v, permutation(kCompressTable.entry[bits]))));
  return static_cast<uint32_t>(__builtin_popcount(bits));
}
GRADFERRY_LANE F32 expand(F32 x, Mask m) {
  const __m256i lanes = permutation(kExpandTable.entry[lane_bits(m)]);
  return select(m, F32(_mm256_permutevar8x32_ps(x.v, lanes)), F32(0.0f));
}
GRADFERRY_LANE U32 lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

#else

GRADFERRY_LANE uint32_t lane_bits(Mask m) { return m ? 1 : 0; }
GRADFERRY_LANE Mask lanes_of(uint32_t bits) { return (bits & 1) != 0; }
GRADFERRY_LANE U32 add_where(Mask m, U32 c) { return c + (m ? 1 : 0); }
GRADFERRY_LANE uint32_t reduce_sum(U32 x) { return x; }
GRADFERRY_LANE uint32_t store_chosen(uint32_t* p, U32 x, Mask m) {
  store(p, x);
  return m ? 1 : 0;
}
GRADFERRY_LANE F32 expand(F32 x, Mask m) { return m ? x : 0.0f; }
GRADFERRY_LANE U32 lane_numbers() { return 0; }

#endif

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
