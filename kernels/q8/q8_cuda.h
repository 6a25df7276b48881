// The q8 codec on CUDA.
//
// A block of 128 is a row of a warp's slice (slice.h); a lane's four codes of a row are one word,
// so that a warp writes a row's codes as one line. Lane l finds the scale of row l % 8: one
// division and one reciprocal per 32 elements. Encoding with error feedback moves 13 bytes per
// element.
#pragma once

#include "kernels/cuda/scaled_rows.h"
#include "kernels/cuda/tile_kernels.h"
#include "kernels/q8/q8_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q8 {

// Bit 8 i + 7 of the result: byte i of `codes` is the code that no encoder writes.
GRADFERRY_DEVICE uint32_t broken_bytes(uint32_t codes) {
  const uint32_t x = codes ^ q8::kBrokenCode * 0x01010101u;
  return ~(((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u;
}

// The integer of a code, which is a byte. In the last places of 2^23, code + 128 is a positive
// number.
GRADFERRY_DEVICE float code_value(uint32_t code) {
  return from_bits(code ^ 0x4b000080u) - (0x1p23f + 128.0f);
}

struct Q8 {
  using Options = NoOptions;
  static constexpr CodecRow kRow = CodecRow::q8;
  static constexpr bool kByBlocks = false;
  static constexpr bool kUnitsAreQuads = true;
  static constexpr bool kUsesDtype = false;
  struct Words {
    uint32_t codes[kRows];
    RawScale scale;
  };
  template <ScalarType>
  using Raw = Words;

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType, Stage stage, Options) {
    return q8::payload_bytes(n, ScalarType::kFloat32, stage, CodecOptions());
  }

  template <ScalarType, bool>
  GRADFERRY_DEVICE static void encode(const TileUnit<Options>& unit, float* v, PayloadWriter& out) {
    const Slice& slice = unit.slice;
    const uint32_t scales_offset = q8::scales_offset(slice.num_elements);
    out.zeros(scales_offset + 2 * block_scale::num_blocks(slice.num_elements), unit.payload_bytes);
    if (slice.is_empty()) return;

    uint32_t largest[kRows];
    quad_maxima(v, largest);
    const uint32_t row_largest =
        combine_octets(rows_to_lanes(slice, largest, Maximum()), Maximum());
    const bool finite = row_largest < kInfinityBits;
    const q8::BlockScale<float> own = q8::scale_of(from_bits(row_largest));
    write_scale(slice, scales_offset, finite ? own.code : block_scale::kNonFinite, out);
    const float own_reciprocal = finite ? own.reciprocal : from_bits(kNanBits);

    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const float scale = of_row(own.scale, row), reciprocal = of_row(own_reciprocal, row);
      const bool row_is_finite = !is_not_finite(reciprocal);
      uint32_t codes = 0;
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        float& x = v[kQuad * row + i];
        const q8::Element<float> element = q8::encode_element(x, scale, reciprocal);
        codes |= element.code << (8 * i);
        x = row_is_finite ? x - element.value : from_bits(kNanBits);
      }
      if (slice.element(row) < scales_offset) {
        out.word(slice.first, row_is_finite ? codes : 0, row * kRowElements);
      }
    }
  }

  template <ScalarType>
  GRADFERRY_DEVICE static Words fetch(const TileUnit<Options>& unit, const std::byte* payload) {
    const Slice& slice = unit.slice;
    const uint32_t scales_offset = q8::scales_offset(slice.num_elements);
    Words raw{};
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t element = slice.element(row);
      if (element < scales_offset) raw.codes[row] = read<uint32_t>(payload + element);
    }
    raw.scale = fetch_scale(slice, payload, scales_offset, unit.payload_bytes);
    return raw;
  }

  template <ScalarType>
  GRADFERRY_DEVICE static void sum(const TileUnit<Options>& unit, const Words& raw,
                                   PayloadSum& sum) {
    const Slice& slice = unit.slice;
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      sum.add_word(slice.first, raw.codes[row], row * kRowElements);
    }
    sum_scale(slice, q8::scales_offset(slice.num_elements), raw.scale, sum);
  }

  template <ScalarType, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const Words& raw,
                                          Sink sink) {
    const Slice& slice = unit.slice;
    if (slice.is_empty()) return 0;
    uint32_t codes[kRows], broken_rows = 0;
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) codes[row] = raw.codes[row];
    if (!slice.is_whole()) {
      rare_path();  // codes beyond the tile's end are ignored
      const uint32_t n = fresh(slice.num_elements);
      GRADFERRY_UNROLL
      for (uint32_t row = 0; row < kRows; ++row) {
        const uint32_t element = slice.element(row), rest = element < n ? n - element : 0;
        if (rest < kQuad) codes[row] &= (1u << (8 * rest)) - 1;
      }
    }
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      broken_rows |= (broken_bytes(codes[row]) != 0 ? 1u : 0u) << row;
    }
    broken_rows = warp_or(broken_rows);
    const RowScale own = scale_of_pattern(raw.scale.pattern, q8::kLargestScale,
                                          (broken_rows >> (slice.lane % kRows) & 1) != 0);
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const float scale = of_row(own.scale, row);
      const uint32_t meaningful = scale > 0.0f ? codes[row] : 0;
      if (is_nan(scale)) {
        rare_path();
        GRADFERRY_UNROLL
        for (uint32_t i = 0; i < kQuad; ++i) sink(kQuad * row + i, from_bits(kNanBits));
        continue;
      }
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        sink(kQuad * row + i, code_value(meaningful >> (8 * i) & 0xffu), scale);
      }
    }
    return own.flags;
  }
};

using TileCodec = Q8;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q8
