// Signs as bits of an integer.
//
//   sign_bits(x)                bit l is the sign bit of lane l
//   with_signs(x, word, first)  x, which has no signs, with bit first + l of a word as the sign of
//                               lane l; first: a multiple of kLanes below 32
#pragma once

#include "kernels/common/simd.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

#if defined(GRADFERRY_KERNEL_AVX512)

GRADFERRY_LANE uint32_t sign_bits(F32 x) { return _mm512_movepi32_mask(bits(x).v); }
GRADFERRY_LANE F32 with_signs(F32 x, uint32_t word, uint32_t first) {
  const U32 last(_mm512_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16));
  const U32 signs(_mm512_sllv_epi32(U32(word).v, (last - U32(first)).v));
  return from_bits(bits(x) | (signs & U32(kSignBit)));
}

#elif defined(GRADFERRY_KERNEL_AVX2)

GRADFERRY_LANE uint32_t sign_bits(F32 x) { return static_cast<uint32_t>(_mm256_movemask_ps(x.v)); }
// A blend looks at nothing but the sign of its condition.
GRADFERRY_LANE F32 with_signs(F32 x, uint32_t word, uint32_t first) {
  const U32 last(_mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
  const __m256i signs = _mm256_sllv_epi32(U32(word).v, (last - U32(first)).v);
  const F32 negative = from_bits(bits(x) | U32(kSignBit));
  return _mm256_blendv_ps(x.v, negative.v, _mm256_castsi256_ps(signs));
}

#else

GRADFERRY_LANE uint32_t sign_bits(F32 x) { return bits(x) >> 31; }
GRADFERRY_LANE F32 with_signs(F32 x, uint32_t word, uint32_t first) {
  return from_bits(bits(x) | (word >> first) << 31);
}

#endif

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
