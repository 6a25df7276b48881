// AVX2 and F16C: 8 lanes. See simd.h. A Mask is a vector whose lanes are all ones or all zeros.
#pragma once

#include <immintrin.h>

#include "kernels/common/lane.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

inline constexpr uint32_t kLanes = 8;

struct Mask {
  __m256i v;
  GRADFERRY_LANE friend Mask operator&(Mask a, Mask b) { return {_mm256_and_si256(a.v, b.v)}; }
  GRADFERRY_LANE friend Mask operator|(Mask a, Mask b) { return {_mm256_or_si256(a.v, b.v)}; }
};
GRADFERRY_LANE bool any(Mask m) { return _mm256_testz_si256(m.v, m.v) == 0; }
GRADFERRY_LANE bool all(Mask m) { return _mm256_movemask_epi8(m.v) == -1; }

struct U32 {
  __m256i v;
  U32() = default;
  GRADFERRY_LANE U32(__m256i x) : v(x) {}
  GRADFERRY_LANE explicit U32(uint32_t x) : v(_mm256_set1_epi32(static_cast<int>(x))) {}
  GRADFERRY_LANE friend U32 operator+(U32 a, U32 b) { return _mm256_add_epi32(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator-(U32 a, U32 b) { return _mm256_sub_epi32(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator*(U32 a, U32 b) { return _mm256_mullo_epi32(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator&(U32 a, U32 b) { return _mm256_and_si256(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator|(U32 a, U32 b) { return _mm256_or_si256(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator^(U32 a, U32 b) { return _mm256_xor_si256(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator<<(U32 a, int n) { return _mm256_slli_epi32(a.v, n); }
  GRADFERRY_LANE friend U32 operator>>(U32 a, int n) { return _mm256_srli_epi32(a.v, n); }
  GRADFERRY_LANE friend Mask operator==(U32 a, U32 b) { return {_mm256_cmpeq_epi32(a.v, b.v)}; }
  // AVX2 compares signed integers only: a <= b where the unsigned maximum of both is b.
  GRADFERRY_LANE friend Mask operator<=(U32 a, U32 b) {
    return U32(_mm256_max_epu32(a.v, b.v)) == b;
  }
  GRADFERRY_LANE friend Mask operator>=(U32 a, U32 b) { return b <= a; }
};

struct F32 {
  __m256 v;
  F32() = default;
  GRADFERRY_LANE F32(__m256 x) : v(x) {}
  GRADFERRY_LANE explicit F32(float x) : v(_mm256_set1_ps(x)) {}
  GRADFERRY_LANE friend F32 operator+(F32 a, F32 b) { return _mm256_add_ps(a.v, b.v); }
  GRADFERRY_LANE friend F32 operator-(F32 a, F32 b) { return _mm256_sub_ps(a.v, b.v); }
  GRADFERRY_LANE friend F32 operator*(F32 a, F32 b) { return _mm256_mul_ps(a.v, b.v); }
  GRADFERRY_LANE friend F32 operator/(F32 a, F32 b) { return _mm256_div_ps(a.v, b.v); }
  GRADFERRY_LANE friend Mask operator<(F32 a, F32 b) {
    return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
  }
  GRADFERRY_LANE friend Mask operator>(F32 a, F32 b) { return b < a; }
  GRADFERRY_LANE friend Mask operator==(F32 a, F32 b) {
    return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ))};
  }
};

GRADFERRY_LANE U32 bits(F32 x) { return _mm256_castps_si256(x.v); }
GRADFERRY_LANE F32 from_bits(U32 x) { return _mm256_castsi256_ps(x.v); }
GRADFERRY_LANE U32 select(Mask m, U32 a, U32 b) { return _mm256_blendv_epi8(b.v, a.v, m.v); }
GRADFERRY_LANE F32 select(Mask m, F32 a, F32 b) {
  return _mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(m.v));
}
GRADFERRY_LANE U32 or_where(Mask m, U32 a, U32 b) { return a | U32(_mm256_and_si256(m.v, b.v)); }
GRADFERRY_LANE F32 square_root(F32 x) { return _mm256_sqrt_ps(x.v); }
GRADFERRY_LANE U32 multiply_high(U32 a, U32 b) {
  const __m256i even = _mm256_mul_epu32(a.v, b.v);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a.v, 32), _mm256_srli_epi64(b.v, 32));
  return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
GRADFERRY_LANE F32 minimum(F32 a, F32 b) { return _mm256_min_ps(a.v, b.v); }
GRADFERRY_LANE F32 maximum(F32 a, F32 b) { return _mm256_max_ps(a.v, b.v); }
GRADFERRY_LANE U32 maximum(U32 a, U32 b) { return _mm256_max_epu32(a.v, b.v); }
GRADFERRY_LANE uint32_t reduce_maximum(U32 x) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(x.v), _mm256_extracti128_si256(x.v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

GRADFERRY_LANE U32 lane_maxima(const U32 (&x)[kLanes]) {
  // Each step halves what is left of every vector and joins two of them; in the end one quarter of
  // each, per 128-bit half, has become one lane.
  const auto join = [](U32 a, U32 b) {
    return maximum(U32(_mm256_unpacklo_epi32(a.v, b.v)), U32(_mm256_unpackhi_epi32(a.v, b.v)));
  };
  const auto join_pairs = [](U32 a, U32 b) {
    return maximum(U32(_mm256_unpacklo_epi64(a.v, b.v)), U32(_mm256_unpackhi_epi64(a.v, b.v)));
  };
  const U32 low = join_pairs(join(x[0], x[1]), join(x[2], x[3]));
  const U32 high = join_pairs(join(x[4], x[5]), join(x[6], x[7]));
  return maximum(U32(_mm256_permute2x128_si256(low.v, high.v, 0x20)),
                 U32(_mm256_permute2x128_si256(low.v, high.v, 0x31)));
}

GRADFERRY_LANE F32 load(const float* p) { return _mm256_loadu_ps(p); }
GRADFERRY_LANE U32 load(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
GRADFERRY_LANE void store(float* p, F32 x) { _mm256_storeu_ps(p, x.v); }
GRADFERRY_LANE void store(uint32_t* p, U32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v);
}
GRADFERRY_LANE void stream(float* p, F32 x) { _mm256_stream_ps(p, x.v); }
GRADFERRY_LANE void finish_streams() { _mm_sfence(); }

GRADFERRY_LANE U32 load_bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
GRADFERRY_LANE U32 load_halfwords(const uint16_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
GRADFERRY_LANE F32 load_signed_bytes(const int8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
GRADFERRY_LANE bool has_byte(const void* p, uint32_t num_bytes, uint8_t byte) {
  const auto* bytes = static_cast<const uint8_t*>(p);
  const __m256i wanted = _mm256_set1_epi8(static_cast<char>(byte));
  __m256i found = _mm256_setzero_si256();
  for (uint32_t i = 0; i < num_bytes; i += 32) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
    found = _mm256_or_si256(found, _mm256_cmpeq_epi8(x, wanted));
  }
  return _mm256_testz_si256(found, found) == 0;
}
GRADFERRY_LANE void store_bytes(uint8_t* p, U32 x) {
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(x.v), _mm256_extracti128_si256(x.v, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
GRADFERRY_LANE void store_halfwords(uint16_t* p, U32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(x.v), _mm256_extracti128_si256(x.v, 1)));
}
GRADFERRY_LANE F32 load_fp16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
GRADFERRY_LANE void store_fp16(uint16_t* p, F32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

struct Table16 {
  __m256 low, high;
  GRADFERRY_LANE explicit Table16(const float* table)
      : low(_mm256_loadu_ps(table)), high(_mm256_loadu_ps(table + 8)) {}
};
GRADFERRY_LANE F32 lookup(const Table16& table, U32 index) {
  const __m256 bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(index.v, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, index.v),
                          _mm256_permutevar8x32_ps(table.high, index.v), bit3);
}

struct Table8 {
  __m256 values;
  GRADFERRY_LANE explicit Table8(const float* table) : values(_mm256_loadu_ps(table)) {}
};
GRADFERRY_LANE F32 lookup(const Table8& table, U32 index) {
  return _mm256_permutevar8x32_ps(table.values, index.v);
}
GRADFERRY_LANE Table8 scaled(Table8 table, float factor) {
  table.values = _mm256_mul_ps(table.values, _mm256_set1_ps(factor));
  return table;
}

struct SignedTable8 {
  __m256 values;
  GRADFERRY_LANE explicit SignedTable8(const float* table) : values(_mm256_loadu_ps(table)) {}
};
// Entry i of a scaled table has i added to its top bits without carry; the index, shifted there,
// takes it away again and leaves its own bit 3 as the sign.
struct ScaledTable8 {
  U32 values;
};
GRADFERRY_LANE ScaledTable8 operator*(SignedTable8 table, F32 factor) {
  const U32 lanes(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return {bits(F32(table.values) * factor) ^ (lanes << 28)};
}
GRADFERRY_LANE F32 lookup(const ScaledTable8& table, U32 index) {
  return from_bits(U32(_mm256_permutevar8x32_epi32(table.values.v, index.v)) ^ (index << 28));
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
