// The positions section of a topk payload on CPU: 12-bit indices, two in three bytes, or a bitmap.
#pragma once

#include "kernels/common/simd.h"
#include "kernels/topk/topk_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk {

inline constexpr uint32_t kIndicesAtOnce = 16;
inline constexpr uint32_t kIndicesBytes = 24;
// Sizes of arrays of positions, and of bytes of the section: whole vectors fit behind the last one.
inline constexpr uint32_t kPositionsRoom = kMostKept + 2 * kIndicesAtOnce;
inline constexpr uint32_t kPositionsBytesRoom = kMostKept / 2 * 3 + 64;

// pack_indices: the lower 12 bits of 16 positions, each below 4096, to 24 bytes; writes 26.
// unpack_indices: the other way; reads 28 bytes.
#if defined(GRADFERRY_KERNEL_AVX512) || defined(GRADFERRY_KERNEL_AVX2)

GRADFERRY_LANE void pack_indices(const uint32_t* positions, uint8_t* out) {
  const __m256i first_three_bytes =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 8, 9, 10, -1, -1,  //
                                                -1, -1, -1, -1, -1, -1, -1, -1));
  for (uint32_t i = 0; i < kIndicesAtOnce; i += 8) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(positions + i));
    const __m256i pairs = _mm256_or_si256(x, _mm256_srli_epi64(x, 20));
    const __m256i bytes = _mm256_shuffle_epi8(pairs, first_three_bytes);
    uint8_t* p = out + i / 2 * 3;
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(bytes));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p + 6), _mm256_extracti128_si256(bytes, 1));
  }
}
GRADFERRY_LANE void unpack_indices(const uint8_t* in, uint16_t* positions) {
  const __m256i halfwords =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11));
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + kIndicesBytes / 2));
  const __m256i x = _mm256_shuffle_epi8(_mm256_set_m128i(high, low), halfwords);
  const __m256i even = _mm256_and_si256(x, _mm256_set1_epi16(0xfff));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(positions),
                      _mm256_blend_epi16(even, _mm256_srli_epi16(x, 4), 0xaa));
}

#else

GRADFERRY_LANE void pack_indices(const uint32_t* positions, uint8_t* out) {
  // Each pair writes a byte more than its own three, which the next pair overwrites.
  for (uint32_t i = 0; i < kIndicesAtOnce; i += 2) {
    const uint32_t pair = positions[i] | positions[i + 1] << 12;
    __builtin_memcpy(out + i / 2 * 3, &pair, sizeof(pair));
  }
}
GRADFERRY_LANE void unpack_indices(const uint8_t* in, uint16_t* positions) {
  for (uint32_t i = 0; i < kIndicesAtOnce; i += 2) {
    uint32_t pair;
    __builtin_memcpy(&pair, in + i / 2 * 3, sizeof(pair));
    positions[i] = static_cast<uint16_t>(pair & 0xfffu);
    positions[i + 1] = static_cast<uint16_t>(pair >> 12 & 0xfffu);
  }
}

#endif

// positions: kPositionsRoom of them, of which k count.
inline void encode_positions(const Layout& layout, uint32_t* positions, std::byte* out) {
  alignas(64) uint8_t bytes[kPositionsBytesRoom];
  if (layout.bitmap) {
    __builtin_memset(bytes, 0, layout.positions_bytes);
    for (uint32_t j = 0; j < layout.k; ++j) {
      bytes[positions[j] / 8] |= static_cast<uint8_t>(1u << positions[j] % 8);
    }
  } else {
    positions[layout.k] = 0;  // spare bits
    for (uint32_t j = 0; j < layout.k; j += kIndicesAtOnce) {
      pack_indices(positions + j, bytes + j / 2 * 3);
    }
  }
  __builtin_memcpy(out, bytes, layout.positions_bytes);
}

// Unpacks 12-bit indices to kPositionsRoom positions, of which k count. Returns whether they
// increase, stay below n and leave spare bits zero.
inline bool decode_indices(const Layout& layout, const std::byte* in, uint16_t* positions) {
  alignas(64) uint8_t bytes[kPositionsBytesRoom];
  __builtin_memcpy(bytes, in, layout.positions_bytes);
  __builtin_memset(bytes + layout.positions_bytes, 0, 32);
  uint32_t unpacked = 0;
  do {
    unpack_indices(bytes + unpacked / 2 * 3, positions + unpacked);
    unpacked += kIndicesAtOnce;
  } while (unpacked < layout.k);
  uint16_t steps = 0;  // bit 15 of a step is set where it is not upwards
  for (uint32_t j = 1; j < layout.k; ++j) {
    steps |= static_cast<uint16_t>(positions[j] - positions[j - 1] - 1);
  }
  const bool spare_is_zero = layout.k % 2 == 0 || positions[layout.k] == 0;
  return steps < 0x8000u && spare_is_zero && positions[layout.k - 1] < layout.num_elements;
}

// Copies a bitmap, followed by zeros. Returns whether it has k ones, all below n.
inline bool decode_bitmap(const Layout& layout, const std::byte* in, uint64_t* words) {
  constexpr uint32_t kWords = kTileElements / 64;
  __builtin_memset(words, 0, kWords * sizeof(uint64_t));
  __builtin_memcpy(words, in, layout.positions_bytes);
  uint32_t count = 0;
  for (uint32_t i = 0; i < kWords; ++i) {
    count += static_cast<uint32_t>(__builtin_popcountll(words[i]));
  }
  const uint32_t n = layout.num_elements;
  const bool inside = n % 64 == 0 || words[n / 64] >> n % 64 == 0;
  return inside && count == layout.k;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk
