// Signs as bits of memory.
//
//   sign_bits(x)            bit l is the sign bit of lane l
//   flip_signs(x, bytes, i) changes the sign of lane l where bit i + l of the bytes is set,
//                           bit 8 being the lowest of the second byte; i: a multiple of kLanes
#pragma once

#include <cstddef>

#include "kernels/common/simd.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

#if defined(GRADFERRY_KERNEL_AVX512)

GRADFERRY_LANE uint32_t sign_bits(F32 x) { return _mm512_movepi32_mask(bits(x).v); }
GRADFERRY_LANE F32 flip_signs(F32 x, const std::byte* bytes, uint32_t i) {
  uint32_t word;
  __builtin_memcpy(&word, bytes + i / 32 * sizeof(word), sizeof(word));
  const U32 last(_mm512_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16));
  const U32 signs(_mm512_sllv_epi32(U32(word).v, (last - U32(i % 32)).v));
  return from_bits(bits(x) ^ (signs & U32(kSignBit)));
}

#elif defined(GRADFERRY_KERNEL_AVX2)

// The sign bits of eight lanes, by the byte that holds them. It costs a quarter of the smallest L1
// cache, and saves the shifts that would bring each bit to its place.
struct SignTable {
  alignas(64) uint32_t signs[256][kLanes];
};
constexpr SignTable make_sign_table() {
  SignTable table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (uint32_t l = 0; l < kLanes; ++l) table.signs[byte][l] = (byte >> l & 1) << 31;
  }
  return table;
}
inline constexpr SignTable kSignTable = make_sign_table();

GRADFERRY_LANE uint32_t sign_bits(F32 x) { return static_cast<uint32_t>(_mm256_movemask_ps(x.v)); }
GRADFERRY_LANE F32 flip_signs(F32 x, const std::byte* bytes, uint32_t i) {
  return from_bits(bits(x) ^ load(kSignTable.signs[static_cast<uint32_t>(bytes[i / 8])]));
}

#else

GRADFERRY_LANE uint32_t sign_bits(F32 x) { return bits(x) >> 31; }
GRADFERRY_LANE F32 flip_signs(F32 x, const std::byte* bytes, uint32_t i) {
  return from_bits(bits(x) ^ (static_cast<uint32_t>(bytes[i / 8]) >> (i % 8)) << 31);
}

#endif

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
