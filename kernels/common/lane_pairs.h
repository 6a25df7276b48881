// Butterflies and sums across the lanes of a vector, and signs from random words: what a Hadamard
// transform needs, on every instruction set.
//
//   split<k>(a, b)  For k = 0, 1, .. while 2^k < kLanes, each after the one before: afterwards a
//                   holds those lanes of both vectors whose number has bit k clear, b those with
//                   bit k set, and numbers that differ in nothing else lie at the same place. After
//                   the last one, a followed by b reads a0 b0 a1 b1 a2 b2 .. of the vectors at the
//                   start.
//   join<k>(a, b)   undoes split<k>, in the opposite order.
//   halving_sum(x)  adds lanes l and l + kLanes/2, then l and l + kLanes/4, .. down to one
//   flip_signs(x, words, i)
//                   changes the sign of lane l where bit i + l of the words is set, bit 32 being
//                   the lowest of the second word; i: a multiple of kLanes
#pragma once

#include <cstddef>

#include "kernels/common/simd.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

#if defined(GRADFERRY_KERNEL_AVX512)

template <uint32_t k>
GRADFERRY_LANE void split(F32& a, F32& b) {
  const __m512 x = a.v, y = b.v;
  if constexpr (k < 2) {  // 0 2 of both, 1 3 of both: of the floats of a quarter, of quarters
    a = _mm512_shuffle_ps(x, y, 0x88);
    b = _mm512_shuffle_ps(x, y, 0xdd);
  } else {
    a = _mm512_shuffle_f32x4(x, y, 0x88);
    b = _mm512_shuffle_f32x4(x, y, 0xdd);
  }
}
template <uint32_t k>
GRADFERRY_LANE void join(F32& a, F32& b) {
  const __m512 x = a.v, y = b.v;
  if constexpr (k < 2) {
    a = _mm512_unpacklo_ps(x, y);
    b = _mm512_unpackhi_ps(x, y);
  } else {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    a = _mm512_permutex2var_ps(x, low, y);
    b = _mm512_permutex2var_ps(x, high, y);
  }
}
GRADFERRY_LANE float halving_sum(F32 x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
GRADFERRY_LANE F32 flip_signs(F32 x, const uint32_t* words, uint32_t i) {
  uint16_t lanes;
  __builtin_memcpy(&lanes, reinterpret_cast<const std::byte*>(words) + i / 8, sizeof(lanes));
  return from_bits(_mm512_mask_xor_epi32(bits(x).v, lanes, bits(x).v, U32(kSignBit).v));
}

#elif defined(GRADFERRY_KERNEL_AVX2)

template <uint32_t k>
GRADFERRY_LANE void split(F32& a, F32& b) {
  const __m256 x = a.v, y = b.v;
  if constexpr (k < 2) {  // 0 2 of both, 1 3 of both
    a = _mm256_shuffle_ps(x, y, 0x88);
    b = _mm256_shuffle_ps(x, y, 0xdd);
  } else {
    a = _mm256_permute2f128_ps(x, y, 0x20);
    b = _mm256_permute2f128_ps(x, y, 0x31);
  }
}
template <uint32_t k>
GRADFERRY_LANE void join(F32& a, F32& b) {
  const __m256 x = a.v, y = b.v;
  if constexpr (k < 2) {
    a = _mm256_unpacklo_ps(x, y);
    b = _mm256_unpackhi_ps(x, y);
  } else {
    split<k>(a, b);
  }
}
GRADFERRY_LANE float halving_sum(F32 x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
GRADFERRY_LANE F32 flip_signs(F32 x, const uint32_t* words, uint32_t i) {
  const U32 shifts = U32(_mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24)) - U32(i % 32);
  const U32 signs = U32(_mm256_sllv_epi32(U32(words[i / 32]).v, shifts.v)) & U32(kSignBit);
  return from_bits(bits(x) ^ signs);
}

#else

// There is nothing to split in one lane.
template <uint32_t k>
GRADFERRY_LANE void split(F32&, F32&) {}
template <uint32_t k>
GRADFERRY_LANE void join(F32&, F32&) {}
GRADFERRY_LANE float halving_sum(F32 x) { return x; }
GRADFERRY_LANE F32 flip_signs(F32 x, const uint32_t* words, uint32_t i) {
  return from_bits(bits(x) ^ ((words[i / 32] >> (i % 32)) << 31));
}

#endif

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
