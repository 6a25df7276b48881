// The sign1 codec on CUDA.
//
// A block of 128 is a row of a warp's slice (slice.h), whose sum's tree is four elements in a lane,
// then lanes 1, 2, 4, 8 and 16 apart. Lane l finds the scale of row l % 8, and collects the 32
// signs of its octet in that row: a warp writes its 1024 signs as one line of 128 bytes. Encoding
// with error feedback moves 12.1 bytes per element.
#pragma once

#include <functional>

#include "kernels/cuda/scaled_rows.h"
#include "kernels/cuda/tile_kernels.h"
#include "kernels/sign1/sign1_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::sign1 {

constexpr uint32_t kRowBytes = kRowElements / 8;

// Offset of the word of signs that the lane writes or reads: row lane % 8, the lane's octet.
GRADFERRY_DEVICE uint32_t word_offset(const Slice& slice) {
  return kRowBytes * own_block(slice) + slice.lane / 8 * 4;
}

struct Sign1 {
  using Options = NoOptions;
  static constexpr CodecRow kRow = CodecRow::sign1;
  static constexpr bool kByBlocks = false;
  static constexpr bool kUnitsAreQuads = true;
  static constexpr bool kUsesDtype = false;
  struct Words {
    uint32_t signs;
    RawScale scale;
  };
  template <ScalarType>
  using Raw = Words;

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType, Stage stage, Options) {
    return sign1::payload_bytes(n, ScalarType::kFloat32, stage, CodecOptions());
  }

  template <ScalarType, bool>
  GRADFERRY_DEVICE static void encode(const TileUnit<Options>& unit, float* v, PayloadWriter& out) {
    const Slice& slice = unit.slice;
    const uint32_t n = slice.num_elements, scales_offset = sign1::scales_offset(n);
    out.zeros(scales_offset + 2 * block_scale::num_blocks(n), unit.payload_bytes);
    if (slice.is_empty()) return;

    float sums[kRows];
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const float* x = v + kQuad * row;
      sums[row] = (sign1::summand(x[0]) + sign1::summand(x[1])) +
                  (sign1::summand(x[2]) + sign1::summand(x[3]));
    }
    const float sum = combine_octets(rows_to_lanes(slice, sums, std::plus<>()), std::plus<>());
    const bool finite = !is_not_finite(sum);
    const uint32_t rest = n - own_block(slice) * kRowElements;
    const bool is_short = own_block_exists(slice) && rest < kRowElements;
    const float share = is_short ? static_cast<float>(rest) / kRowElements : 1.0f;
    const uint32_t own = finite ? sign1::scale_of(sum, share) : block_scale::kNonFinite;
    write_scale(slice, scales_offset, own, out);

    uint32_t signs[kRows];
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t scale = of_row(own, row);
      const bool has_signs = scale != block_scale::kZero && scale != block_scale::kNonFinite;
      const uint32_t mask = has_signs ? kSignBit : 0;
      signs[row] = 0;
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        float& x = v[kQuad * row + i];
        const uint32_t sign = bits(x) & mask;
        signs[row] |= sign >> (31 - i);
        // v minus NaN is NaN, which never replaces a residual.
        x = x - from_bits(sign | scale << 16);
      }
      signs[row] <<= kQuad * (slice.lane % 8);
    }
    const uint32_t word = rows_to_lanes(slice, signs, std::bit_or<>());
    const uint32_t offset = word_offset(slice);
    if (offset + 4 <= scales_offset) {
      out.word(offset, word);
    } else if (offset + 2 <= scales_offset) {
      out.halfword(offset, word);
    }
  }

  template <ScalarType>
  GRADFERRY_DEVICE static Words fetch(const TileUnit<Options>& unit, const std::byte* payload) {
    const uint32_t scales_offset = sign1::scales_offset(unit.slice.num_elements);
    const uint32_t offset = word_offset(unit.slice);
    // The payload goes on after the signs: a word that is half theirs may be read as a whole.
    return {offset + 2 <= scales_offset ? read<uint32_t>(payload + offset) : 0,
            fetch_scale(unit.slice, payload, scales_offset, unit.payload_bytes)};
  }

  template <ScalarType>
  GRADFERRY_DEVICE static void sum(const TileUnit<Options>& unit, const Words& raw,
                                   PayloadSum& sum) {
    const uint32_t scales_offset = sign1::scales_offset(unit.slice.num_elements);
    const uint32_t offset = word_offset(unit.slice);
    sum.add_word(offset, offset + 4 <= scales_offset ? raw.signs : raw.signs & 0xffffu);
    sum_scale(unit.slice, scales_offset, raw.scale, sum);
  }

  template <ScalarType, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const Words& raw,
                                          Sink sink) {
    const Slice& slice = unit.slice;
    if (slice.is_empty()) return 0;
    const RowScale own = scale_of_pattern(raw.scale.pattern, block_scale::kLargest, false);
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const float scale = of_row(own.scale, row);
      const uint32_t octet_signs = __shfl_sync(kAllLanes, raw.signs, (slice.lane & ~7u) + row);
      const uint32_t signs = scale > 0.0f ? octet_signs >> (kQuad * (slice.lane % 8)) : 0;
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        sink(kQuad * row + i, from_bits(bits(scale) | (signs << (31 - i) & kSignBit)));
      }
    }
    return own.flags;
  }
};

using TileCodec = Sign1;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::sign1
