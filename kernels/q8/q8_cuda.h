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
  static constexpr bool kUnitsAreQuads = true;
  static constexpr bool kUsesDtype = false;
  // By itself the compiler spills where gradients have 16 bits.
  static constexpr uint32_t kMinBlocks = 4;

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType dtype, Stage stage,
                                                 Options) {
    return q8::payload_bytes(n, dtype, stage, CodecOptions());
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
        out.word(slice.element(row), row_is_finite ? codes : 0);
      }
    }
  }

  template <ScalarType, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const std::byte* payload,
                                          Sink sink) {
    const Slice& slice = unit.slice;
    if (slice.is_empty()) return 0;
    const uint32_t n = slice.num_elements;
    uint32_t words[kRows], broken_rows = 0;
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t element = slice.element(row);
      words[row] = element < n ? read<uint32_t>(payload + element) : 0;
    }
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      // Codes beyond the tile's end are ignored.
      const uint32_t rest = n - slice.element(row);
      const uint32_t looked_at = slice.is_whole() || rest >= kQuad ? ~0u : (1u << (8 * rest)) - 1;
      const bool broken = (broken_bytes(words[row]) & looked_at) != 0;
      broken_rows |= (broken ? 1u : 0u) << row;
    }
    broken_rows = warp_or(broken_rows);
    const RowScale own = read_scale(slice, payload, q8::scales_offset(n), q8::kLargestScale,
                                    (broken_rows >> (slice.lane % kRows) & 1) != 0);
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const float scale = of_row(own.scale, row);
      const bool is_number = !is_nan(scale);
      const uint32_t codes = scale > 0.0f ? words[row] : 0;
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        const float value = code_value(codes >> (8 * i) & 0xffu) * scale;
        sink(kQuad * row + i, is_number ? value : from_bits(kNanBits));
      }
    }
    return own.flags;
  }
};

using TileCodec = Q8;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q8
