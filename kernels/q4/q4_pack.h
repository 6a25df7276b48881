// From the rounded numbers of a block to its 16 bytes of codes. The one place where q4 differs
// between instruction sets; the bytes do not.
#pragma once

#include "kernels/common/simd.h"
#include "kernels/q4/q4_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4 {

// Elements i of a block, i = 0 .. 31, are doubled[i / kLanes], lane i % kLanes: integers of
// nearest_doubled(). Byte j of `out` gets element j in its low and j + 16 in its high half.
#if defined(GRADFERRY_KERNEL_AVX512)

// The codes from a table of 32 numbers, once as they are and once shifted to the high half.
struct Packer {
  __m512i low[2], high[2];
  GRADFERRY_LANE Packer() {
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_loadu_si512(kCodeOfDoubled + 16 * i);
      high[i] = _mm512_slli_epi32(low[i], 4);
    }
  }
  GRADFERRY_LANE void pack(const F32 (&doubled)[2], uint8_t* out) const {
    const __m512i l = _mm512_cvtps_epi32(doubled[0].v), h = _mm512_cvtps_epi32(doubled[1].v);
    store_bytes(out, U32(_mm512_or_si512(_mm512_permutex2var_epi32(low[0], l, low[1]),
                                         _mm512_permutex2var_epi32(high[0], h, high[1]))));
  }
};

#elif defined(GRADFERRY_KERNEL_AVX2)

// All 32 numbers as bytes in one vector; a byte shuffle looks up magnitudes.
struct Packer {
  __m256i magnitudes, in_order;
  GRADFERRY_LANE Packer()
      : magnitudes(_mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodeOfMagnitude)))),
        in_order(_mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)) {}
  GRADFERRY_LANE void pack(const F32 (&doubled)[4], uint8_t* out) const {
    __m256i n[4];
    for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(doubled[i].v);
    // Packing works within 128-bit halves: groups of four come out as 0 2 4 6 1 3 5 7.
    const __m256i mixed =
        _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, in_order);
    const __m256i magnitude = _mm256_shuffle_epi8(magnitudes, _mm256_abs_epi8(bytes));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(8));
    const __m256i codes = _mm256_or_si256(magnitude, sign);
    const __m128i high = _mm_slli_epi16(_mm256_extracti128_si256(codes, 1), 4);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_or_si128(_mm256_castsi256_si128(codes), high));
  }
};

#else

struct Packer {
  void pack(const F32 (&doubled)[32], uint8_t* out) const {
    const auto code = [](float x) { return kCodeOfDoubled[static_cast<int32_t>(x) & 31]; };
    for (uint32_t j = 0; j < kHalfBlock; ++j) {
      out[j] = static_cast<uint8_t>(code(doubled[j]) | (code(doubled[j + kHalfBlock]) << 4));
    }
  }
};

#endif

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4
