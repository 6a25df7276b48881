// The q4 codec on CUDA.
//
// A group of 1024 is the slice of a warp, a block of 32 the quads of 8 neighbouring lanes in one
// row (slice.h). So a group is coded by one warp in three steps, all of them in registers:
//   1. largest magnitudes of the 32 blocks, each in the lane that will compute its scale
//   2. that lane computes the block's scale: one division and one reciprocal per 32 elements
//   3. codes and residuals, with the scales sent back to the octets; codes of elements
//      16 apart, which share a byte, are 4 lanes apart and meet by one shuffle per two rows
// Encoding with error feedback moves 12.5 bytes per element. It is bound by memory as long as it
// stays under some 80 instructions per element; most of what there is are the 9 of rounding.
#pragma once

#include "kernels/cuda/e2m1_codes.h"
#include "kernels/cuda/tile_kernels.h"
#include "kernels/q4/q4_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4 {

constexpr uint32_t kRowBlocks = kRowElements / q4::kBlock;  // 4
constexpr uint32_t kRowBytes = kRowElements / 2;            // of codes
static_assert(kSliceElements == q4::kGroup && kRows * kRowBlocks == kWarpLanes);

// Where the lane stands in its octet, and what of the payload is its own.
struct Place {
  uint32_t octet;       // first lane of the lane's octet
  uint32_t sub;         // lane within it: quads of elements 4 * sub .. of a block
  uint32_t block;       // the block whose scale the lane computes
  uint32_t num_blocks;  // of the tile

  GRADFERRY_DEVICE explicit Place(const Slice& slice)
      : octet(slice.lane & ~7u),
        sub(slice.lane & 7u),
        block(slice.warp * q4::kGroupBlocks + kRowBlocks * sub + octet / 8),
        num_blocks(q4::num_blocks(slice.num_elements)) {}

  // In each pair of rows, lanes of the lower half of an octet hold the bytes of the first row's
  // block, the others those of the second row's: four bytes each, a whole line per warp.
  GRADFERRY_DEVICE uint32_t code_block(const Slice& slice, uint32_t row) const {
    return slice.warp * q4::kGroupBlocks + kRowBlocks * (row + sub / 4) + octet / 8;
  }
  GRADFERRY_DEVICE uint32_t code_offset(const Slice& slice, uint32_t row) const {
    return q4::kHalfBlock * code_block(slice, row) + 4 * (sub & 3);
  }
  GRADFERRY_DEVICE bool is_low() const { return sub < 4; }
  // The value in the lane that computes the scale of this octet's block of a row.
  GRADFERRY_DEVICE float of_row(float x, uint32_t row) const {
    return __shfl_sync(kAllLanes, x, static_cast<int>(octet + row));
  }
};

// Codes a row's quad: four codes, a byte each. x becomes what they withhold.
GRADFERRY_DEVICE uint32_t encode_quad(float* x, float half_scale, float reciprocal) {
  uint32_t codes = 0;
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kQuad; ++i) {
    const float doubled = q4::nearest_doubled(x[i], reciprocal);
    codes |= q4::code_of_doubled(doubled) << (8 * i);
    x[i] = x[i] - doubled * half_scale;
  }
  return codes;
}

// A group that is not finite: exponent 255, everything else 0.
GRADFERRY_DEVICE void write_non_finite(const Slice& slice, const Place& place, float* v,
                                       PayloadWriter& out) {
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; row += 2) {
    if (place.code_block(slice, row) < place.num_blocks) {
      out.word(place.code_offset(slice, row), 0);
    }
  }
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = from_bits(kNanBits);
}

// Group exponents up to which a scale, at most 448, times 2^14 is finite.
constexpr int32_t kLargestHalfExponent = 104;

struct Q4 {
  using Options = NoOptions;
  static constexpr CodecRow kRow = CodecRow::q4;
  static constexpr bool kByBlocks = false;
  static constexpr bool kUnitsAreQuads = true;
  static constexpr bool kUsesDtype = false;
  struct Words {
    uint32_t codes[kRows / 2], scale, exponent, padding;
  };
  template <ScalarType>
  using Raw = Words;

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType, Stage stage, Options) {
    return q4::payload_bytes(n, ScalarType::kFloat32, stage, CodecOptions());
  }

  template <ScalarType, bool>
  GRADFERRY_DEVICE static void encode(const TileUnit<Options>& unit, float* v, PayloadWriter& out) {
    const Slice& slice = unit.slice;
    const uint32_t n = slice.num_elements;
    out.zeros(q4::exponents_offset(n) + q4::num_groups(n), unit.payload_bytes);
    if (slice.is_empty()) return;

    const Place place(slice);
    uint32_t largest[kRows];
    quad_maxima(v, largest);
    const uint32_t block_largest = rows_to_lanes(slice, largest, Maximum());
    const uint32_t group_largest = warp_maximum(block_largest);
    const bool finite = group_largest < kInfinityBits;
    const int32_t k = q4::group_exponent(group_largest);
    const q4::BlockScale<float> scale = q4::block_scale(from_bits(block_largest), k);
    if (place.block < place.num_blocks) {
      out.byte(q4::scales_offset(n) + place.block, finite ? scale.code : 0);
    }
    const bool any_scale = __any_sync(kAllLanes, scale.code != 0 ? 1 : 0) != 0;
    if (slice.lane == 0) {
      const uint32_t exponent = any_scale ? static_cast<uint32_t>(k + q4::kExponentBias) : 0;
      out.byte(q4::exponents_offset(n) + slice.warp, finite ? exponent : q4::kNonFiniteExponent);
    }
    if (!finite) {
      rare_path();
      write_non_finite(slice, place, v, out);
      return;
    }
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; row += 2) {
      uint32_t codes[2];
      GRADFERRY_UNROLL
      for (uint32_t r = 0; r < 2; ++r) {
        codes[r] = encode_quad(v + kQuad * (row + r), place.of_row(scale.half_scale, row + r),
                               place.of_row(scale.reciprocal, row + r));
      }
      const uint32_t kept = place.is_low() ? codes[0] : codes[1];
      const uint32_t sent = place.is_low() ? codes[1] : codes[0];
      const uint32_t met = __shfl_xor_sync(kAllLanes, sent, 4);
      if (place.code_block(slice, row) < place.num_blocks) {
        out.word(place.code_offset(slice, 0), place.is_low() ? kept | met << 4 : met | kept << 4,
                 row * kRowBytes);
      }
    }
  }

  template <ScalarType>
  GRADFERRY_DEVICE static Words fetch(const TileUnit<Options>& unit, const std::byte* payload) {
    const Slice& slice = unit.slice;
    const uint32_t n = slice.num_elements, exponents = q4::exponents_offset(n);
    const Place place(slice);
    Words raw{};
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; row += 2) {
      if (place.code_block(slice, row) < place.num_blocks) {
        raw.codes[row / 2] = read<uint32_t>(payload + place.code_offset(slice, row));
      }
    }
    if (place.block < place.num_blocks) {
      raw.scale = read<uint8_t>(payload + q4::scales_offset(n) + place.block);
    }
    if (!slice.is_empty()) raw.exponent = read<uint8_t>(payload + exponents + slice.warp);
    raw.padding = read_padding(payload, exponents + q4::num_groups(n), unit.payload_bytes);
    return raw;
  }

  template <ScalarType>
  GRADFERRY_DEVICE static void sum(const TileUnit<Options>& unit, const Words& raw,
                                   PayloadSum& sum) {
    const Slice& slice = unit.slice;
    const uint32_t n = slice.num_elements, exponents = q4::exponents_offset(n);
    const Place place(slice);
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; row += 2) {
      sum.add_word(place.code_offset(slice, 0), raw.codes[row / 2], row * kRowBytes);
    }
    sum.add(q4::scales_offset(n) + place.block, raw.scale);
    sum.add(exponents + slice.warp, slice.lane == 0 ? raw.exponent : 0);
    sum.add(exponents + q4::num_groups(n) + threadIdx.x, raw.padding);
  }

  template <ScalarType, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const Words& raw,
                                          Sink sink) {
    const Slice& slice = unit.slice;
    if (slice.is_empty()) return 0;
    const Place place(slice);
    const int32_t k = static_cast<int32_t>(raw.exponent) - q4::kExponentBias;
    const bool scale_is_valid = q4::is_valid_scale(raw.scale, q4::scale_range(raw.exponent));
    const bool valid = __all_sync(kAllLanes, scale_is_valid ? 1 : 0) != 0;
    if (!valid || raw.exponent == q4::kNonFiniteExponent) {
      rare_path();
      GRADFERRY_UNROLL
      for (uint32_t j = 0; j < kLaneElements; ++j) sink(j, from_bits(kNanBits));
      return valid ? kTileNonFinite : kTileNonFinite | kTileCorrupt;
    }

    // Half the scale: 6 times that is finite, 12 times is what code 7 stands for. It is multiplied
    // by 2^15 for the numbers of half_values(), unless the group is so large that it would
    // overflow.
    const float half_scale = q4::decode_scale(raw.scale, k) * 0.5f;
    const auto give = [&](float factor, float of_value) {
      GRADFERRY_UNROLL
      for (uint32_t row = 0; row < kRows; row += 2) {
        const uint32_t own = raw.codes[row / 2];
        const uint32_t met = __shfl_xor_sync(kAllLanes, own, 4);
        const uint32_t codes[2] = {place.is_low() ? own : met >> 4,
                                   place.is_low() ? met : own >> 4};
        GRADFERRY_UNROLL
        for (uint32_t r = 0; r < 2; ++r) {
          const float f = place.of_row(factor, row + r);
          // Codes of a zero block are ignored: a negative one would decode to -0.
          float x[kQuad];
          q4::half_values(f == 0.0f ? 0 : codes[r], x);
          GRADFERRY_UNROLL
          for (uint32_t i = 0; i < kQuad; ++i) sink(kQuad * (row + r) + i, x[i] * of_value, f);
        }
      }
    };
    if (k <= kLargestHalfExponent) {
      give(half_scale * 0x1p15f, 1.0f);
    } else {
      rare_path();
      give(half_scale, 0x1p15f);
    }
    return 0;
  }
};

using TileCodec = Q4;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::q4
