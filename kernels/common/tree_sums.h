// Sums in the tree of the wire format: adjacent numbers first, strides 1, 2, 4, ...
#pragma once

#include "kernels/common/simd.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Adds neighbours among the 2 kLanes numbers of a, then b: the first two, the next two, and so on.
#if defined(GRADFERRY_KERNEL_AVX512)
GRADFERRY_LANE F32 pair_sums(F32 a, F32 b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return F32(_mm512_permutex2var_ps(a.v, even, b.v)) + F32(_mm512_permutex2var_ps(a.v, odd, b.v));
}
#elif defined(GRADFERRY_KERNEL_AVX2)
GRADFERRY_LANE F32 pair_sums(F32 a, F32 b) {
  // Within the halves of a vector: two sums of a, two of b, then two of a, two of b.
  const F32 sums = F32(_mm256_shuffle_ps(a.v, b.v, 0x88)) + F32(_mm256_shuffle_ps(a.v, b.v, 0xdd));
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums.v), 0xd8));
}
#else
GRADFERRY_LANE F32 pair_sums(F32 a, F32 b) { return a + b; }
#endif

// Lane l is the sum of the kCount / kLanes consecutive numbers from l * kCount / kLanes on. read(i)
// gives numbers i .. i + kLanes - 1; kCount is kLanes times a power of two.
template <uint32_t kCount, typename Read>
GRADFERRY_LANE F32 tree_sums(Read read, uint32_t first = 0) {
  if constexpr (kCount == kLanes) {
    return read(first);
  } else {
    constexpr uint32_t kHalf = kCount / 2;
    return pair_sums(tree_sums<kHalf>(read, first), tree_sums<kHalf>(read, first + kHalf));
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
