// Codes of rht and their bytes: a plane of kWidth bits per code is 16 kWidth bytes, of which byte j
// holds, from bit 0 up, the coordinates j, j + 16 kWidth, j + 32 kWidth, ... 4 and 2 bits are one
// plane, 3 bits are a plane of two (indices of magnitudes) and a plane of one (signs).
#pragma once

#include "kernels/common/tile_driver.h"
#include "kernels/rht/rht_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht {

// Where a unit's bytes lie. T: std::byte or const std::byte.
template <typename T>
struct UnitBytes {
  T* codes;
  T* scales;
  uint32_t num_blocks;
  uint32_t block_bytes;  // of a block's codes

  GRADFERRY_LANE UnitBytes(const Unit& unit, uint32_t bits, T* payload)
      : codes(payload + unit.first / kBlock * code_bytes(bits)),
        scales(payload + scales_offset(unit.tile.num_elements, bits) + 2 * (unit.first / kBlock)),
        num_blocks(unit.padded / kBlock),
        block_bytes(code_bytes(bits)) {}

  GRADFERRY_LANE T* codes_of(uint32_t block) const { return codes + block * block_bytes; }
  // Scales as fp32 bits.
  GRADFERRY_LANE uint32_t scale(uint32_t block) const {
    uint16_t bf16;
    __builtin_memcpy(&bf16, scales + 2 * block, sizeof(bf16));
    return uint32_t{bf16} << 16;
  }
  GRADFERRY_LANE void set_scale(uint32_t block, uint32_t scale_bits) const {
    const auto bf16 = static_cast<uint16_t>(scale_bits >> 16);
    __builtin_memcpy(scales + 2 * block, &bf16, sizeof(bf16));
  }
};

// Writes the codes, each an index and a sign bit, of the coordinates j + 32 k, k = 0 .. 3, for a
// vector of j below 32.
template <uint32_t kBits>
GRADFERRY_LANE void store_codes(uint32_t j, const U32* index, const U32* sign, std::byte* codes) {
  auto* out = reinterpret_cast<uint8_t*>(codes);
  if constexpr (kBits == 3) {
    store_bytes(out + j, index[0] | (index[1] << 2) | (index[2] << 4) | (index[3] << 6));
    // A byte of signs holds j and j + 16.
    uint8_t* signs = out + kGroup + j % 16;
    const U32 even = (sign[0] >> 31) | (sign[1] >> 29) | (sign[2] >> 27) | (sign[3] >> 25);
    store_bytes(signs, j < 16 ? even : load_bytes(signs) | (even << 1));
    return;
  }
  U32 code[4];
  for (uint32_t k = 0; k < 4; ++k) code[k] = index[k] | (sign[k] >> static_cast<int>(32 - kBits));
  if constexpr (kBits == 4) {
    store_bytes(out + j, code[0] | (code[2] << 4));
    store_bytes(out + kGroup + j, code[1] | (code[3] << 4));
  } else {
    store_bytes(out + j, code[0] | (code[1] << 2) | (code[2] << 4) | (code[3] << 6));
  }
}

// Calls take(i, magnitudes, signs) with the codes of a block, by coordinate, in units of the table.
template <uint32_t kBits, typename Take>
GRADFERRY_LANE void for_codes(const std::byte* codes, const Table8& magnitudes, Take take) {
  constexpr uint32_t kWidth = kBits == 4 ? 4 : 2;
  constexpr uint32_t kBytes = 16 * kWidth;
  const auto* bytes = reinterpret_cast<const uint8_t*>(codes);
  for (uint32_t i = 0; i < kBlock; i += kLanes) {
    // Bits above the index are other codes': the table is indexed by three bits and repeats.
    const U32 code = load_bytes(bytes + i % kBytes) >> static_cast<int>(i / kBytes * kWidth);
    U32 sign = code << static_cast<int>(32 - kBits);
    if constexpr (kBits == 3) {
      sign = load_bytes(bytes + kBytes + i % 16) << static_cast<int>(31 - i / 16);
    }
    take(i, lookup(magnitudes, code), sign & U32(kSignBit));
  }
}

// Codebook values of a block's codes, by coordinate.
template <uint32_t kBits>
GRADFERRY_LANE void load_codes(const std::byte* codes, float* z) {
  for_codes<kBits>(codes, Table8(Codebook<kBits>::kMagnitudes),
                   [&](uint32_t i, F32 magnitude, U32 sign) {
                     store(z + i, from_bits(bits(magnitude) | sign));
                   });
}

// Adds them, times a scale >= 0, and their magnitudes.
template <uint32_t kBits>
GRADFERRY_LANE void add_codes(const std::byte* codes, float scale, float* sums, float* magnitudes) {
  const Table8 table = scaled(Table8(Codebook<kBits>::kMagnitudes), scale);
  for_codes<kBits>(codes, table, [&](uint32_t i, F32 magnitude, U32 sign) {
    store(sums + i, load(sums + i) + from_bits(bits(magnitude) | sign));
    store(magnitudes + i, load(magnitudes + i) + magnitude);
  });
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht
