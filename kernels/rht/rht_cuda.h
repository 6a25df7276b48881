// The rht codec on CUDA.
//
// A block of 128 is a row of a warp's slice, and a warp codes its eight rows without shared memory:
// the transform's strides of 4 and more are shuffles, 5 per element and direction. That, not
// memory, is what encoding with error feedback has most of: some 13 shuffles per element
// beside 12.5 bytes. Square roots, quotients and random bits are computed by one lane per row; sums
// over rows of eight blocks share their shuffles (rows_to_lanes).
#pragma once

#include "kernels/cuda/scaled_rows.h"
#include "kernels/cuda/tile_kernels.h"
#include "kernels/rht/rht_rows.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht {

// --- device helpers ------------------------------------------------------------------------------

// Random signs: lane l has the word of row l % 8 that concerns its octet.
struct Signs {
  uint32_t word;

  template <typename Unit>
  GRADFERRY_DEVICE explicit Signs(const Unit& unit) {
    const Slice& slice = unit.slice;
    const auto random = rht::random_signs(unit.seed, unit.step,
                                          unit.tile_id * rht::kTileBlocks + own_block(slice), 0u);
    const uint32_t low = is_upper(slice, 8) ? random.word[1] : random.word[0];
    const uint32_t high = is_upper(slice, 8) ? random.word[3] : random.word[2];
    word = is_upper(slice, 16) ? high : low;
  }
  // Bit e: whether the lane's element e of the row changes its sign.
  GRADFERRY_DEVICE uint32_t of_quad(const Slice& slice, uint32_t row) const {
    const uint32_t octet_word = __shfl_sync(kAllLanes, word, (slice.lane & ~7u) + row);
    return octet_word >> (kQuad * (slice.lane % 8));
  }
};
GRADFERRY_DEVICE float flip(float x, uint32_t signs, uint32_t e) {
  return from_bits(bits(x) ^ (signs << (31 - e) & kSignBit));
}

// Each row's sum of squares, in the lane that rows_to_lanes(.., 16, 8, 4) gives it to.
GRADFERRY_DEVICE float energies(const Slice& slice, const float* x) {
  float folded[kQuad];
  rht::fold_rows(slice, 16, 8, 4, [&](uint32_t j) { return x[j] * x[j]; }, folded);
  rht::fold_pairs(2, folded);
  rht::fold_pairs(1, folded);
  return rht::fold_quad(folded);
}
GRADFERRY_DEVICE int energy_lane(uint32_t row) { return rht::lane_of_row(row, 16, 8, 4); }
GRADFERRY_DEVICE int projection_lane(uint32_t row) { return rht::lane_of_row(row, 16, 8, 2); }

// The row whose energy a lane holds.
struct RowState {
  float root;
  int32_t exponent;  // the row was multiplied by 2^-exponent
  bool finite;
};

// Measures rows; multiplies those of unusual energy by a power of two in `x`, which is v otherwise.
GRADFERRY_DEVICE RowState measure_rows(const Slice& slice, const float* v, float* x) {
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) x[j] = v[j];
  float energy = energies(slice, v);
  const bool plain = energy >= rht::kSmallestPlainEnergy && energy <= rht::kLargestPlainEnergy;
  RowState own = {0.0f, 0, true};
  if (__all_sync(kAllLanes, plain ? 1 : 0) == 0) {
    rare_path();
    uint32_t largest[kRows];
    quad_maxima(v, largest);
    uint32_t row_largest = rows_to_lanes(slice, largest, Maximum(), 16, 8, 4);
    row_largest = maximum(row_largest, __shfl_xor_sync(kAllLanes, row_largest, 2));
    row_largest = maximum(row_largest, __shfl_xor_sync(kAllLanes, row_largest, 1));
    own.finite = row_largest < kInfinityBits;
    own.exponent = plain || !own.finite ? 0 : rht::block_exponent(row_largest);
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const int32_t exponent = __shfl_sync(kAllLanes, own.exponent, energy_lane(row));
      const float factor = rht::power_of_two(-exponent);
      GRADFERRY_UNROLL
      for (uint32_t e = 0; e < kQuad; ++e) x[kQuad * row + e] = v[kQuad * row + e] * factor;
    }
    energy = energies(slice, x);
  }
  own.root = square_root(energy);
  return own;
}

// The largest magnitude of a row's elements.
GRADFERRY_DEVICE float row_largest(const float* x) {
  const uint32_t largest = maximum(maximum(magnitude_bits(x[0]), magnitude_bits(x[1])),
                                   maximum(magnitude_bits(x[2]), magnitude_bits(x[3])));
  return from_bits(warp_maximum(largest));
}

// Values of a row's codes, transformed back.
template <uint32_t kBits>
GRADFERRY_DEVICE void decode_row(const Slice& slice, uint32_t codes, float* u) {
  GRADFERRY_UNROLL
  for (uint32_t e = 0; e < kQuad; ++e) u[e] = rht::value_of<kBits>(codes >> (8 * e));
  rht::transform_row(slice, u);
}

// The bytes of a slice's codes: `codes` has a byte per element and a word per row.
template <uint32_t kWidth>
GRADFERRY_DEVICE void write_plane(const Slice& slice, const uint32_t* fields, uint32_t num_blocks,
                                  uint32_t block_bytes, uint32_t plane_offset, PayloadWriter& out) {
  const rht::Plane<kWidth> plane(slice);
  uint32_t words[kWidth];
  plane.gather(slice, fields, words);
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kWidth; ++i) {
    const uint32_t block = kRows * slice.warp + plane.row(i);
    if (block < num_blocks) out.word(block * block_bytes + plane_offset + plane.offset, words[i]);
  }
}
template <uint32_t kWidth>
GRADFERRY_DEVICE void read_plane(const Slice& slice, const std::byte* codes, uint32_t num_blocks,
                                 uint32_t block_bytes, uint32_t* fields) {
  const rht::Plane<kWidth> plane(slice);
  uint32_t words[kWidth];
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kWidth; ++i) {
    const uint32_t block = kRows * slice.warp + plane.row(i);
    words[i] = block < num_blocks ? read<uint32_t>(codes + block * block_bytes + plane.offset) : 0;
  }
  plane.spread(slice, words, fields);
}

template <uint32_t kBits>
GRADFERRY_DEVICE void write_codes(const Slice& slice, const uint32_t* codes, PayloadWriter& out) {
  const uint32_t num_blocks = rht::num_blocks(slice.num_elements);
  constexpr uint32_t kBytes = rht::kBlock / 8 * kBits;
  if constexpr (kBits == 3) {
    uint32_t indices[kRows], signs[kRows];
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      indices[row] = codes[row] & 0x03030303u;
      signs[row] = codes[row] >> 2 & 0x01010101u;
    }
    write_plane<2>(slice, indices, num_blocks, kBytes, 0, out);
    write_plane<1>(slice, signs, num_blocks, kBytes, 32, out);
  } else {
    write_plane<kBits>(slice, codes, num_blocks, kBytes, 0, out);
  }
}
// Bits of a byte above the code belong to other codes.
template <uint32_t kBits>
GRADFERRY_DEVICE void read_codes(const Slice& slice, const std::byte* payload, uint32_t* codes) {
  const uint32_t num_blocks = rht::num_blocks(slice.num_elements);
  constexpr uint32_t kBytes = rht::kBlock / 8 * kBits;
  if constexpr (kBits == 3) {
    uint32_t signs[kRows];
    read_plane<2>(slice, payload, num_blocks, kBytes, codes);
    read_plane<1>(slice, payload + 32, num_blocks, kBytes, signs);
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      codes[row] = (codes[row] & 0x03030303u) | (signs[row] & 0x01010101u) << 2;
    }
  } else {
    read_plane<kBits>(slice, payload, num_blocks, kBytes, codes);
  }
}

// --- codec ---------------------------------------------------------------------------------------

// Calls f with the width of the codes.
template <typename F>
GRADFERRY_DEVICE void with_width(const rht::Options& options, F f) {
  switch (options.bits) {
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    default: return f.template operator()<4>();
  }
}

// What differs by width is in branches, and arrays are outside of them: see tile_kernels.h.
struct Rht {
  using Options = rht::Options;
  static constexpr bool kUnitsAreQuads = false;
  static constexpr bool kUsesDtype = false;
  static constexpr uint32_t kMinBlocks = 1;

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType, Stage,
                                                 const Options& options) {
    return rht::payload_bytes(n, options);
  }

  template <ScalarType, bool kKeep>
  GRADFERRY_DEVICE static void encode(const TileUnit<Options>& unit, float* v, PayloadWriter& out) {
    const Slice& slice = unit.slice;
    const uint32_t n = slice.num_elements, scales_offset = rht::scales_offset(n, unit.options.bits);
    out.zeros(scales_offset + 2 * rht::num_blocks(n), unit.payload_bytes);
    if (slice.is_empty()) return;

    // v beyond the tile's end counts as zero and is coded, but has no residual in memory.
    const Signs signs(unit);
    float x[kLaneElements];
    const RowState state = measure_rows(slice, v, x);
    uint32_t codes[kRows];
    float powers[kRows];
    with_width(unit.options, [&]<uint32_t kBits>() {
      GRADFERRY_UNROLL
      for (uint32_t row = 0; row < kRows; ++row) {
        float* z = x + kQuad * row;
        const uint32_t flips = signs.of_quad(slice, row);
        const rht::Quantizer<kBits> quantizer(__shfl_sync(kAllLanes, state.root, energy_lane(row)));
        GRADFERRY_UNROLL
        for (uint32_t e = 0; e < kQuad; ++e) z[e] = flip(z[e], flips, e);
        rht::transform_row(slice, z);
        codes[row] = 0;
        powers[row] = 0.0f;
        GRADFERRY_UNROLL
        for (uint32_t e = 0; e < kQuad; ++e) {
          const float magnitude = from_bits(magnitude_bits(z[e]));
          const uint32_t index = quantizer.index(magnitude);
          const float value = rht::magnitude_of<kBits>(index);
          const uint32_t code = index | bits(z[e]) >> 31 << (kBits - 1);
          codes[row] |= code << (8 * e);
          powers[row] = powers[row] + value * value;  // exact, in any order
          z[e] = magnitude * value;
        }
      }
    });

    // Scales, in the lanes that have their rows' projections.
    float folded[kQuad];
    rht::fold_rows(slice, 16, 8, 2, [&](uint32_t j) { return x[j]; }, folded);
    rht::fold_pairs(1, folded);
    float projection = rht::fold_quad(folded);
    projection = projection + __shfl_xor_sync(kAllLanes, projection, 4);
    float power = rows_to_lanes(slice, powers, Sum(), 16, 8, 2);
    power = power + __shfl_xor_sync(kAllLanes, power, 1);
    power = power + __shfl_xor_sync(kAllLanes, power, 4);
    // The same row's energy is where bit 2 of the lane is what bit 1 is here.
    const int state_lane = static_cast<int>((slice.lane & 24) | (is_upper(slice, 2) ? 4u : 0u));
    const int32_t exponent = __shfl_sync(kAllLanes, state.exponent, state_lane);
    const bool finite = __shfl_sync(kAllLanes, state.finite ? 1u : 0u, state_lane) != 0;
    const uint32_t biased = static_cast<uint32_t>(exponent) + rht::kExponentBias;
    const uint32_t found = rht::block_scale(projection, power, biased);
    const uint32_t row_scale = finite ? found : kNanBits;

    uint32_t own_scale = 0;
    with_width(unit.options, [&]<uint32_t kBits>() {
      GRADFERRY_UNROLL
      for (uint32_t row = 0; row < kRows; ++row) {
        uint32_t scale = __shfl_sync(kAllLanes, row_scale, projection_lane(row));
        const int32_t row_exponent = __shfl_sync(kAllLanes, exponent, projection_lane(row));
        const bool is_huge = row_exponent >= rht::kHugeExponent && scale != kNanBits && scale != 0;
        float u[kQuad];
        if (kKeep || is_huge) decode_row<kBits>(slice, codes[row], u);
        if (is_huge) {
          rare_path();
          const float largest = row_largest(u);
          while (is_not_finite(from_bits(scale) * largest)) scale -= 0x10000u;
        }
        if (scale == 0 || scale == kNanBits) codes[row] = 0;
        if constexpr (kKeep) {
          const uint32_t flips = signs.of_quad(slice, row);
          GRADFERRY_UNROLL
          for (uint32_t e = 0; e < kQuad; ++e) {
            const float value = scale == 0 ? 0.0f : flip(from_bits(scale), flips, e) * u[e];
            v[kQuad * row + e] = v[kQuad * row + e] - value;
          }
        }
        own_scale = slice.lane % kRows == row ? scale : own_scale;
      }
      write_codes<kBits>(slice, codes, out);
    });
    write_scale(slice, scales_offset, own_scale >> 16, out);
  }

  template <ScalarType, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const std::byte* payload,
                                          Sink sink) {
    const Slice& slice = unit.slice;
    if (slice.is_empty()) return 0;
    const Signs signs(unit);
    uint32_t codes[kRows];
    RowScale own =
        read_scale(slice, payload, rht::scales_offset(slice.num_elements, unit.options.bits),
                   block_scale::kLargest, false);
    uint32_t flags = own.flags;
    with_width(unit.options, [&]<uint32_t kBits>() {
      read_codes<kBits>(slice, payload, codes);
      GRADFERRY_UNROLL
      for (uint32_t row = 0; row < kRows; ++row) {
        float scale = of_row(own.scale, row);
        float u[kQuad];
        decode_row<kBits>(slice, codes[row], u);
        if (bits(scale) >= rht::kOverflowingScale && bits(scale) < kInfinityBits) {
          rare_path();
          if (is_not_finite(scale * row_largest(u))) {
            scale = from_bits(kNanBits);
            flags |= kTileNonFinite | kTileCorrupt;
          }
        }
        const uint32_t flips = signs.of_quad(slice, row);
        GRADFERRY_UNROLL
        for (uint32_t e = 0; e < kQuad; ++e) {
          const float value = flip(scale, flips, e) * u[e];
          // Zero and NaN blocks have the value itself, without a sign.
          sink(kQuad * row + e, scale > 0.0f ? value : scale);
        }
      }
    });
    return flags;
  }
};

using TileCodec = Rht;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht
