// AVX-512 (F, BW, VL, DQ): 16 lanes. See simd.h.
#pragma once

#include <immintrin.h>

#include "kernels/common/lane.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

inline constexpr uint32_t kLanes = 16;

struct Mask {
  __mmask16 v;
  GRADFERRY_LANE friend Mask operator&(Mask a, Mask b) { return {_kand_mask16(a.v, b.v)}; }
  GRADFERRY_LANE friend Mask operator|(Mask a, Mask b) { return {_kor_mask16(a.v, b.v)}; }
};
GRADFERRY_LANE bool any(Mask m) { return m.v != 0; }
GRADFERRY_LANE bool all(Mask m) { return m.v == 0xffff; }

struct U32 {
  __m512i v;
  U32() = default;
  GRADFERRY_LANE U32(__m512i x) : v(x) {}
  GRADFERRY_LANE explicit U32(uint32_t x) : v(_mm512_set1_epi32(static_cast<int>(x))) {}
  GRADFERRY_LANE friend U32 operator+(U32 a, U32 b) { return _mm512_add_epi32(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator-(U32 a, U32 b) { return _mm512_sub_epi32(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator*(U32 a, U32 b) { return _mm512_mullo_epi32(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator&(U32 a, U32 b) { return _mm512_and_si512(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator|(U32 a, U32 b) { return _mm512_or_si512(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator^(U32 a, U32 b) { return _mm512_xor_si512(a.v, b.v); }
  GRADFERRY_LANE friend U32 operator<<(U32 a, int n) {
    return _mm512_slli_epi32(a.v, static_cast<unsigned>(n));
  }
  GRADFERRY_LANE friend U32 operator>>(U32 a, int n) {
    return _mm512_srli_epi32(a.v, static_cast<unsigned>(n));
  }
  GRADFERRY_LANE friend Mask operator<=(U32 a, U32 b) {
    return {_mm512_cmple_epu32_mask(a.v, b.v)};
  }
  GRADFERRY_LANE friend Mask operator>=(U32 a, U32 b) {
    return {_mm512_cmpge_epu32_mask(a.v, b.v)};
  }
  GRADFERRY_LANE friend Mask operator==(U32 a, U32 b) {
    return {_mm512_cmpeq_epi32_mask(a.v, b.v)};
  }
};

struct F32 {
  __m512 v;
  F32() = default;
  GRADFERRY_LANE F32(__m512 x) : v(x) {}
  GRADFERRY_LANE explicit F32(float x) : v(_mm512_set1_ps(x)) {}
  GRADFERRY_LANE friend F32 operator+(F32 a, F32 b) { return _mm512_add_ps(a.v, b.v); }
  GRADFERRY_LANE friend F32 operator-(F32 a, F32 b) { return _mm512_sub_ps(a.v, b.v); }
  GRADFERRY_LANE friend F32 operator*(F32 a, F32 b) { return _mm512_mul_ps(a.v, b.v); }
  GRADFERRY_LANE friend F32 operator/(F32 a, F32 b) { return _mm512_div_ps(a.v, b.v); }
  GRADFERRY_LANE friend Mask operator<(F32 a, F32 b) {
    return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)};
  }
  GRADFERRY_LANE friend Mask operator>(F32 a, F32 b) {
    return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)};
  }
  GRADFERRY_LANE friend Mask operator==(F32 a, F32 b) {
    return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)};
  }
};

GRADFERRY_LANE U32 bits(F32 x) { return _mm512_castps_si512(x.v); }
GRADFERRY_LANE F32 from_bits(U32 x) { return _mm512_castsi512_ps(x.v); }
GRADFERRY_LANE F32 select(Mask m, F32 a, F32 b) { return _mm512_mask_blend_ps(m.v, b.v, a.v); }
GRADFERRY_LANE U32 select(Mask m, U32 a, U32 b) { return _mm512_mask_blend_epi32(m.v, b.v, a.v); }
GRADFERRY_LANE U32 or_where(Mask m, U32 a, U32 b) {
  return _mm512_mask_or_epi32(a.v, m.v, a.v, b.v);
}
GRADFERRY_LANE F32 square_root(F32 x) { return _mm512_sqrt_ps(x.v); }
GRADFERRY_LANE U32 multiply_high(U32 a, U32 b) {
  const __m512i even = _mm512_mul_epu32(a.v, b.v);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), _mm512_srli_epi64(b.v, 32));
  return _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
}
GRADFERRY_LANE F32 minimum(F32 a, F32 b) { return _mm512_min_ps(a.v, b.v); }
GRADFERRY_LANE F32 maximum(F32 a, F32 b) { return _mm512_max_ps(a.v, b.v); }
GRADFERRY_LANE U32 maximum(U32 a, U32 b) { return _mm512_max_epu32(a.v, b.v); }
GRADFERRY_LANE uint32_t reduce_maximum(U32 x) { return _mm512_reduce_max_epu32(x.v); }

GRADFERRY_LANE U32 lane_maxima(const U32 (&x)[kLanes]) {
  // Each step halves what is left of every vector and joins two of them: first lanes, then pairs,
  // then 128-bit quarters.
  const auto join_four = [](const U32* y) {
    const auto join = [](U32 a, U32 b) {
      return maximum(U32(_mm512_unpacklo_epi32(a.v, b.v)), U32(_mm512_unpackhi_epi32(a.v, b.v)));
    };
    const U32 low = join(y[0], y[1]), high = join(y[2], y[3]);
    return maximum(U32(_mm512_unpacklo_epi64(low.v, high.v)),
                   U32(_mm512_unpackhi_epi64(low.v, high.v)));
  };
  const auto join_quarters = [](U32 a, U32 b) {
    return maximum(U32(_mm512_shuffle_i32x4(a.v, b.v, 0x88)),
                   U32(_mm512_shuffle_i32x4(a.v, b.v, 0xdd)));
  };
  return join_quarters(join_quarters(join_four(x), join_four(x + 4)),
                       join_quarters(join_four(x + 8), join_four(x + 12)));
}

GRADFERRY_LANE F32 load(const float* p) { return _mm512_loadu_ps(p); }
GRADFERRY_LANE U32 load(const uint32_t* p) { return _mm512_loadu_si512(p); }
GRADFERRY_LANE void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
GRADFERRY_LANE void store(uint32_t* p, U32 x) { _mm512_storeu_si512(p, x.v); }
GRADFERRY_LANE void stream(float* p, F32 x) { _mm512_stream_ps(p, x.v); }
GRADFERRY_LANE void finish_streams() { _mm_sfence(); }

GRADFERRY_LANE U32 load_bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
GRADFERRY_LANE U32 load_halfwords(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
GRADFERRY_LANE F32 load_signed_bytes(const int8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
GRADFERRY_LANE bool has_byte(const void* p, uint32_t num_bytes, uint8_t byte) {
  const auto* bytes = static_cast<const uint8_t*>(p);
  const __m512i wanted = _mm512_set1_epi8(static_cast<char>(byte));
  uint64_t found = 0;
  for (uint32_t i = 0; i < num_bytes; i += 64) {
    found |= _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(bytes + i), wanted);
  }
  return found != 0;
}
GRADFERRY_LANE void store_bytes(uint8_t* p, U32 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x.v));
}
GRADFERRY_LANE void store_halfwords(uint16_t* p, U32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}
GRADFERRY_LANE F32 load_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
GRADFERRY_LANE void store_fp16(uint16_t* p, F32 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

struct Table16 {
  __m512 values;
  GRADFERRY_LANE explicit Table16(const float* table) : values(_mm512_loadu_ps(table)) {}
};
GRADFERRY_LANE F32 lookup(const Table16& table, U32 index) {
  return _mm512_permutexvar_ps(index.v, table.values);
}

struct Table8 {
  __m512 values;
  GRADFERRY_LANE explicit Table8(const float* table)
      : values(_mm512_broadcast_f32x8(_mm256_loadu_ps(table))) {}
};
GRADFERRY_LANE F32 lookup(const Table8& table, U32 index) {
  return _mm512_permutexvar_ps(index.v, table.values);
}
GRADFERRY_LANE Table8 scaled(Table8 table, float factor) {
  table.values = _mm512_mul_ps(table.values, _mm512_set1_ps(factor));
  return table;
}

// The magnitudes, then the same with their sign.
struct SignedTable8 {
  __m512 values;
  GRADFERRY_LANE explicit SignedTable8(const float* table) {
    const __m512 twice = _mm512_broadcast_f32x8(_mm256_loadu_ps(table));
    values = _mm512_mask_xor_ps(twice, 0xff00, twice, _mm512_set1_ps(-0.0f));
  }
};
using ScaledTable8 = SignedTable8;
GRADFERRY_LANE ScaledTable8 operator*(SignedTable8 table, F32 factor) {
  table.values = _mm512_mul_ps(table.values, factor.v);
  return table;
}
GRADFERRY_LANE F32 lookup(const ScaledTable8& table, U32 index) {
  return _mm512_permutexvar_ps(index.v, table.values);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
