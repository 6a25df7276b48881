// From the rounded numbers of a block to its 16 bytes of codes, and from the codes to values. The
// one place where q4 differs between instruction sets; the bytes do not.
#pragma once

#include "kernels/common/simd.h"
#include "kernels/q4/q4_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4 {

// Elements i of a block, i = 0 .. 31, are doubled[i / kLanes], lane i % kLanes: integers of
// nearest_doubled(). Byte j of `out` gets element j in its low and j + 16 in its high half.
// Unpacker: x[i / kLanes], lane i % kLanes, are the values of the codes times `scale`. A NaN for
// scale makes the same NaN of codes that are 0.
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

struct Unpacker {
  SignedTable8 values{kCodeValues};
  GRADFERRY_LANE void unpack(const std::byte* codes, F32 scale, F32 (&x)[2]) const {
    const ScaledTable8 scaled = values * scale;
    const U32 pair = load_bytes(reinterpret_cast<const uint8_t*>(codes));
    x[0] = lookup(scaled, pair);
    x[1] = lookup(scaled, pair >> 4);
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

// Code values are bf16 numbers: byte shuffles look up both of their bytes, which zeros below make
// fp32.
struct Unpacker {
  __m256i upper, lower, order, shifts, low_half;
  GRADFERRY_LANE Unpacker()
      : upper(_mm256_broadcastsi128_si256(_mm_setr_epi8(0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40,
                                                        0x40, -0x80, -0x41, -0x41, -0x41, -0x40,
                                                        -0x40, -0x40, -0x40))),
        lower(_mm256_broadcastsi128_si256(_mm_setr_epi8(0x00, 0x00, -0x80, -0x40, 0x00, 0x40, -0x80,
                                                        -0x40, 0x00, 0x00, -0x80, -0x40, 0x00, 0x40,
                                                        -0x80, -0x40))),
        order(_mm256_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11,  //
                               4, 5, 6, 7, 12, 13, 14, 15, 4, 5, 6, 7, 12, 13, 14, 15)),
        shifts(_mm256_setr_epi64x(0, 4, 0, 4)),
        low_half(_mm256_set1_epi8(0x0f)) {}
  GRADFERRY_LANE void unpack(const std::byte* codes, F32 scale, F32 (&x)[4]) const {
    // Unpacking works within 128-bit halves: `order` puts elements 0-3 8-11 16-19 24-27 into the
    // lower one, so that each vector comes out in order.
    const __m256i pairs =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i code =
        _mm256_and_si256(_mm256_srlv_epi64(_mm256_shuffle_epi8(pairs, order), shifts), low_half);
    const __m256i high = _mm256_shuffle_epi8(upper, code), low = _mm256_shuffle_epi8(lower, code);
    const __m256i first = _mm256_unpacklo_epi8(low, high);
    const __m256i second = _mm256_unpackhi_epi8(low, high);
    const __m256i zero = _mm256_setzero_si256();
    const __m256i values[4] = {
        _mm256_unpacklo_epi16(zero, first), _mm256_unpackhi_epi16(zero, first),
        _mm256_unpacklo_epi16(zero, second), _mm256_unpackhi_epi16(zero, second)};
    for (int i = 0; i < 4; ++i) x[i] = from_bits(U32(values[i])) * scale;
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

struct Unpacker {
  void unpack(const std::byte* codes, F32 scale, F32 (&x)[32]) const {
    for (uint32_t j = 0; j < kHalfBlock; ++j) {
      const auto pair = static_cast<uint32_t>(codes[j]);
      x[j] = value(pair) * scale;
      x[j + kHalfBlock] = value(pair >> 4) * scale;
    }
  }
  static float value(uint32_t code) {
    return from_bits(bits(kCodeValues[code & 7]) | ((code & 8) << 28));
  }
};

#endif

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4
