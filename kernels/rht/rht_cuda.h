// The rht codec on CUDA.
//
// A block of 128 is four lanes' (Slice's by_blocks), so that strides 16, 32, 64, 1 and 2 of the
// transform stay in a lane, and strides 4 and 8 are lanes 1 and 2 apart. Of every 32 coordinates
// lane 4 b + q has eight neighbours: coordinate 32 m + 8 q + 2 e + p is x[4 (2 m + p) + e], and
// bytes of codes need no other lane. Encoding with error feedback moves 12.5 bytes per element;
// some 80 instructions are what it has most of.
#pragma once

#include "kernels/cuda/scaled_rows.h"
#include "kernels/cuda/tile_kernels.h"
#include "kernels/rht/rht_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht {

// --- transform and sums --------------------------------------------------------------------------

// The stride that is `lanes` lanes: x + y in the lower lane, x - y in the upper one.
GRADFERRY_DEVICE void butterflies_across(const Slice& slice, int lanes, float* x) {
  const uint32_t minus = is_upper(slice, lanes) ? kSignBit : 0;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) {
    const float other = __shfl_xor_sync(kAllLanes, x[j], lanes);
    x[j] = other + from_bits(bits(x[j]) ^ minus);
  }
}
GRADFERRY_DEVICE void butterflies(uint32_t stride, float* x) {
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) {
    if ((j & stride) == 0) butterfly(x[j], x[j + stride]);
  }
}

// H of a block, strides in the order of the format: 16 32 64 1 2 4 8. On codebook values, which are
// small integers, every order gives the same, so this serves both ways.
GRADFERRY_DEVICE void transform_block(const Slice& slice, float* x) {
  butterflies(4, x), butterflies(8, x), butterflies(16, x);
  butterflies(1, x), butterflies(2, x);
  butterflies_across(slice, 1, x);
  butterflies_across(slice, 2, x);
}

// Of each pair x[k], x[k + kCount / 2], the lower lane goes on with the first, the upper one with
// the second.
template <uint32_t kCount>
GRADFERRY_DEVICE void halve(const Slice& slice, int lanes, const float* x, float* half) {
  const bool upper = is_upper(slice, lanes);
  GRADFERRY_UNROLL
  for (uint32_t k = 0; k < kCount / 2; ++k) {
    const float sent = upper ? x[k] : x[k + kCount / 2];
    const float kept = upper ? x[k + kCount / 2] : x[k];
    half[k] = kept + __shfl_xor_sync(kAllLanes, sent, lanes);
  }
}
GRADFERRY_DEVICE float add_across(float x, int lanes) {
  return x + __shfl_xor_sync(kAllLanes, x, lanes);
}

// The sum of term(j) over the block's elements, in all of its lanes: strides 64, 32, .. of
// elements.
template <typename Term>
GRADFERRY_DEVICE float sum_elements(const Slice& slice, Term term) {
  float by_e[kQuad], pair[2], one;
  GRADFERRY_UNROLL
  for (uint32_t e = 0; e < kQuad; ++e) {
    const float a = term(e) + term(16 + e), b = term(4 + e) + term(20 + e);
    const float c = term(8 + e) + term(24 + e), d = term(12 + e) + term(28 + e);
    by_e[e] = (a + c) + (b + d);
  }
  halve<4>(slice, 2, by_e, pair);  // stride 8; bit 1 of e is the lane's
  halve<2>(slice, 1, pair, &one);  // stride 4; bit 0 of e is the lane's
  return add_across(add_across(one, 2), 1);
}
// The same over coordinates.
GRADFERRY_DEVICE float sum_coordinates(const Slice& slice, const float* x) {
  float folded[8], four[4], two[2];  // folded[2 e + p]
  GRADFERRY_UNROLL
  for (uint32_t k = 0; k < 8; ++k) {
    folded[k % 4 * 2 + k / 4] = (x[k] + x[16 + k]) + (x[8 + k] + x[24 + k]);
  }
  halve<8>(slice, 2, folded, four);  // stride 16; bit 1 of e is the lane's
  halve<4>(slice, 1, four, two);     // stride 8; bit 0 of e is the lane's
  GRADFERRY_UNROLL
  for (float& y : two) y = add_across(add_across(y, 2), 1);
  return two[0] + two[1];
}

GRADFERRY_DEVICE float block_largest(const float* x) {
  uint32_t largest = 0;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) largest = maximum(largest, magnitude_bits(x[j]));
  largest = maximum(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  return from_bits(maximum(largest, __shfl_xor_sync(kAllLanes, largest, 2)));
}

// --- signs ---------------------------------------------------------------------------------------

GRADFERRY_DEVICE uint32_t block_of(const Slice& slice) {
  return kRows * slice.warp + slice.lane / 4;
}

// Random signs of the lane's elements: bits e and 16 + e of a word are those of i = 2 m and 2 m
// + 1. Where they are used again they are made again, or 32 registers would keep them.
struct Signs {
  uint32_t word[4];

  template <typename Unit>
  GRADFERRY_DEVICE explicit Signs(const Unit& unit) {
    const Slice& slice = unit.slice;
    const auto random = rht::random_signs(unit.seed, unit.step,
                                          unit.tile_id * rht::kTileBlocks + block_of(slice), 0u);
    GRADFERRY_UNROLL
    for (uint32_t m = 0; m < 4; ++m) word[m] = fresh(random.word[m] >> kQuad * (slice.lane % 4));
  }
  GRADFERRY_DEVICE float flip(float x, uint32_t j) const {
    const uint32_t i = j / kQuad, bit = 16 * (i % 2) + j % kQuad;
    return from_bits(bits(x) ^ (word[i / 2] << (31 - bit) & kSignBit));
  }
};

// --- codes ---------------------------------------------------------------------------------------

// How many cuts of the codebook lie below a magnitude, by bisection; cuts are multiples of `root`.
template <uint32_t kBits>
struct Quantizer {
  static constexpr uint32_t kCount = (1u << (kBits - 1)) - 1;
  float cut[kCount];

  GRADFERRY_DEVICE explicit Quantizer(float root) {
    // Cuts are copied to constants: device code cannot refer to the array itself.
    using Book = Codebook<kBits>;
    constexpr float k0 = Book::kCuts[0], k1 = Book::kCuts[1], k2 = Book::kCuts[2],
                    k3 = Book::kCuts[3], k4 = Book::kCuts[4], k5 = Book::kCuts[5],
                    k6 = Book::kCuts[6];
    const float all[7] = {k0, k1, k2, k3, k4, k5, k6};
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kCount; ++i) cut[i] = all[i] * root;
  }
  GRADFERRY_DEVICE uint32_t index(float x) const {
    if constexpr (kBits == 2) return x > cut[0] ? 1 : 0;
    if constexpr (kBits == 3) {
      const bool upper = x > cut[1];
      return (upper ? 2u : 0u) | (x > (upper ? cut[2] : cut[0]) ? 1u : 0u);
    }
    if constexpr (kBits == 4) {
      const bool upper = x > cut[3];
      const bool second = x > (upper ? cut[5] : cut[1]);
      const float low = second ? cut[2] : cut[0], high = second ? cut[6] : cut[4];
      return (upper ? 4u : 0u) | (second ? 2u : 0u) | (x > (upper ? high : low) ? 1u : 0u);
    }
  }
};

// Four magnitudes of the codebook as bytes of a word, for __byte_perm.
template <uint32_t kBits>
constexpr uint32_t pack_magnitudes(uint32_t first) {
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(Codebook<kBits>::kMagnitudes[first + i]) << (8 * i);
  }
  return result;
}
// The magnitude of a code: its byte in the last places of 2^23, then without the 2^23.
template <uint32_t kBits>
GRADFERRY_DEVICE float magnitude_of(uint32_t code) {
  constexpr uint32_t kLow = pack_magnitudes<kBits>(0), kHigh = pack_magnitudes<kBits>(4);
  const uint32_t byte = __byte_perm(kLow, kHigh, code & ((1u << (kBits - 1)) - 1));
  return from_bits(__byte_perm(byte, 0x4b000000u, 0x7440)) - 0x1p23f;
}
template <uint32_t kBits>
GRADFERRY_DEVICE float value_of(uint32_t code) {
  return from_bits(bits(magnitude_of<kBits>(code)) | (code << (32 - kBits) & kSignBit));
}

// Codes as the bytes of the payload lie: byte t of the words 2 m, 2 m + 1 is coordinate 32 m + 8 q
// + t.
GRADFERRY_DEVICE uint32_t word_of(uint32_t j) { return 2 * (j / 8) + j % kQuad / 2; }  // of x[j]
GRADFERRY_DEVICE uint32_t byte_of(uint32_t j) { return 2 * (j % 2) + j / kQuad % 2; }

// Where the lane's bytes are: eight of a plane of 2 bits per coordinate, and of 4 bits eight more
// 32 further; of the plane of a third bit, eight that it shares with the lane 2 apart.
struct Place {
  uint32_t block, first, third;
  bool exists;

  GRADFERRY_DEVICE Place(const Slice& slice, uint32_t bits)
      : block(block_of(slice)),
        first(block * rht::code_bytes(bits) + 8 * (slice.lane % 4)),
        third(block * rht::code_bytes(bits) + 32 + 8 * (slice.lane % 2)),
        exists(block < rht::num_blocks(slice.num_elements)) {}
};

constexpr uint32_t kPairs = 0x03030303u, kOnes = 0x01010101u;

template <uint32_t kBits>
GRADFERRY_DEVICE void write_codes(const Slice& slice, const uint32_t* codes, PayloadWriter& out) {
  const Place place(slice, kBits);
  if constexpr (kBits == 4) {
    if (!place.exists) return;
    out.words(place.first, Bytes8{{codes[0] | codes[4] << 4, codes[1] | codes[5] << 4}});
    out.words(place.first + 32, Bytes8{{codes[2] | codes[6] << 4, codes[3] | codes[7] << 4}});
    return;
  }
  uint32_t pairs[2] = {}, ones[2] = {};
  const uint32_t upper = slice.lane / 2 % 2;
  GRADFERRY_UNROLL
  for (uint32_t k = 0; k < kRows; ++k) {
    pairs[k % 2] |= (codes[k] & kPairs) << (k / 2 * 2);
    ones[k % 2] |= (codes[k] >> 2 & kOnes) << (k / 2 * 2 + upper);
  }
  if constexpr (kBits == 3) {
    GRADFERRY_UNROLL
    for (uint32_t& word : ones) word |= __shfl_xor_sync(kAllLanes, word, 2);
  }
  if (!place.exists) return;
  out.words(place.first, Bytes8{{pairs[0], pairs[1]}});
  if constexpr (kBits == 3) out.word(place.third + 4 * upper, upper == 0 ? ones[0] : ones[1]);
}
// From the words that the lane has read. Bits above a code are others'.
template <uint32_t kBits>
GRADFERRY_DEVICE void split_codes(const Slice& slice, const Bytes8* words, uint32_t* codes) {
  const uint32_t upper = slice.lane / 2 % 2;
  GRADFERRY_UNROLL
  for (uint32_t k = 0; k < kRows; ++k) {
    if constexpr (kBits == 4) codes[k] = words[k / 2 % 2].word[k % 2] >> (k / 4 * 4);
    if constexpr (kBits != 4) codes[k] = words[0].word[k % 2] >> (k / 2 * 2);
    if constexpr (kBits == 3) {
      codes[k] = (codes[k] & kPairs) | (words[1].word[k % 2] >> (k / 2 * 2 + upper) & kOnes) << 2;
    }
  }
}

// Values of codes, transformed back.
template <uint32_t kBits>
GRADFERRY_DEVICE void decode_block(const Slice& slice, const uint32_t* codes, float* u) {
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) {
    u[j] = value_of<kBits>(codes[word_of(j)] >> (8 * byte_of(j)));
  }
  transform_block(slice, u);
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
  static constexpr CodecRow kRow = CodecRow::rht;
  static constexpr bool kByBlocks = true;
  static constexpr bool kUnitsAreQuads = false;
  static constexpr bool kUsesDtype = false;
  struct Words {
    Bytes8 codes[2];
    uint32_t scale, padding;
  };
  template <ScalarType>
  using Raw = Words;

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

    // v beyond the tile's end counts as zero and is coded, but has no residual in memory. It waits
    // in shared memory, where no other lane looks, as x takes its registers.
    auto* waiting = reinterpret_cast<Bytes16*>(scratch() + slice.begin()) + slice.lane;
    if constexpr (kKeep) {
      GRADFERRY_UNROLL
      for (uint32_t row = 0; row < kRows; ++row) {
        write(waiting + row * kWarpLanes, narrow_quad<ScalarType::kFloat32>(v + kQuad * row, true));
      }
    }
    float x[kLaneElements];
    float energy = sum_elements(slice, [&](uint32_t j) { return v[j] * v[j]; });
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) x[j] = v[j];
    const bool plain = energy >= rht::kSmallestPlainEnergy && energy <= rht::kLargestPlainEnergy;
    int32_t exponent = 0;  // the block is multiplied by 2^-exponent
    bool finite = true;
    if (__all_sync(kAllLanes, plain ? 1 : 0) == 0) {
      rare_path();
      const uint32_t largest = bits(block_largest(v));
      finite = largest < kInfinityBits;
      exponent = plain || !finite ? 0 : rht::block_exponent(largest);
      const float factor = rht::power_of_two(-exponent);
      GRADFERRY_UNROLL
      for (uint32_t j = 0; j < kLaneElements; ++j) x[j] = v[j] * factor;
      energy = sum_elements(slice, [&](uint32_t j) { return x[j] * x[j]; });
    }
    const float root = square_root(energy);
    const Signs signs(unit);
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) x[j] = signs.flip(x[j], j);
    transform_block(slice, x);

    uint32_t codes[kRows] = {};
    float power = 0.0f;
    with_width(unit.options, [&]<uint32_t kBits>() {
      const rht::Quantizer<kBits> quantizer(root);
      GRADFERRY_UNROLL
      for (uint32_t j = 0; j < kLaneElements; ++j) {
        const float magnitude = from_bits(magnitude_bits(x[j]));
        const uint32_t index = quantizer.index(magnitude);
        const float value = rht::magnitude_of<kBits>(index);
        const uint32_t code = index | bits(x[j]) >> 31 << (kBits - 1);
        codes[word_of(j)] |= code << (8 * byte_of(j));
        power = power + value * value;  // exact, in any order
        x[j] = magnitude * value;
      }
    });
    const float projection = sum_coordinates(slice, x);
    power = add_across(add_across(power, 1), 2);
    const uint32_t biased = static_cast<uint32_t>(exponent) + rht::kExponentBias;
    uint32_t scale = finite ? rht::block_scale(projection, power, biased) : kNanBits;
    const bool is_huge = exponent >= rht::kHugeExponent && scale != kNanBits && scale != 0;
    const bool any_huge = __any_sync(kAllLanes, is_huge ? 1 : 0) != 0;
    with_width(unit.options, [&]<uint32_t kBits>() {
      if (kKeep || any_huge) decode_block<kBits>(slice, codes, x);
      if (any_huge) {
        rare_path();
        const float largest = block_largest(x);
        while (is_huge && is_not_finite(from_bits(scale) * largest)) scale -= 0x10000u;
        __syncwarp();
      }
      if (scale == 0 || scale == kNanBits) {
        GRADFERRY_UNROLL
        for (uint32_t& word : codes) word = 0;
      }
      write_codes<kBits>(slice, codes, out);
    });
    if (slice.lane % 4 == 0 && block_of(slice) < rht::num_blocks(n)) {
      out.halfword(scales_offset + 2 * block_of(slice), scale >> 16);
    }
    if constexpr (kKeep) {
      const Signs again(unit);
      GRADFERRY_UNROLL
      for (uint32_t row = 0; row < kRows; ++row) {
        widen_quad<ScalarType::kFloat32>(read<Bytes16>(waiting + row * kWarpLanes),
                                         v + kQuad * row);
      }
      GRADFERRY_UNROLL
      for (uint32_t j = 0; j < kLaneElements; ++j) {
        v[j] = v[j] - (scale == 0 ? 0.0f : again.flip(from_bits(scale), j) * x[j]);
      }
    }
  }

  template <ScalarType>
  GRADFERRY_DEVICE static Words fetch(const TileUnit<Options>& unit, const std::byte* payload) {
    const uint32_t n = unit.slice.num_elements, bits = unit.options.bits;
    const uint32_t scales_offset = rht::scales_offset(n, bits);
    const Place place(unit.slice, bits);
    Words raw{};
    if (place.exists) {
      raw.codes[0] = read<Bytes8>(payload + place.first);
      if (bits != 2)
        raw.codes[1] = read<Bytes8>(payload + (bits == 3 ? place.third : place.first + 32));
      raw.scale = read<uint16_t>(payload + scales_offset + 2 * place.block);
    }
    raw.padding = read_padding(payload, scales_offset + 2 * rht::num_blocks(n), unit.payload_bytes);
    return raw;
  }

  template <ScalarType>
  GRADFERRY_DEVICE static void sum(const TileUnit<Options>& unit, const Words& raw,
                                   PayloadSum& sum) {
    const uint32_t n = unit.slice.num_elements, bits = unit.options.bits, q = unit.slice.lane % 4;
    const uint32_t scales_offset = rht::scales_offset(n, bits);
    const Place place(unit.slice, bits);
    sum.add_words(place.first, raw.codes[0]);
    if (bits != 3 || q < 2) {
      sum.add_words(bits == 3 ? place.third : place.first + 32, raw.codes[1]);
    }
    sum.add(scales_offset + 2 * place.block, q == 0 ? raw.scale : 0);
    sum.add(scales_offset + 2 * rht::num_blocks(n) + threadIdx.x, raw.padding);
  }

  template <ScalarType, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const Words& raw,
                                          Sink sink) {
    const Slice& slice = unit.slice;
    if (slice.is_empty()) return 0;
    float u[kLaneElements];
    with_width(unit.options, [&]<uint32_t kBits>() {
      uint32_t codes[kRows];
      split_codes<kBits>(slice, raw.codes, codes);
      decode_block<kBits>(slice, codes, u);
    });
    const Signs signs(unit);
    RowScale own = scale_of_pattern(raw.scale, block_scale::kLargest, false);
    const bool may_overflow =
        bits(own.scale) >= rht::kOverflowingScale && bits(own.scale) < kInfinityBits;
    if (__any_sync(kAllLanes, may_overflow ? 1 : 0) != 0) {
      rare_path();
      const float largest = block_largest(u);
      if (may_overflow && is_not_finite(own.scale * largest)) {
        own = {from_bits(kNanBits), kTileNonFinite | kTileCorrupt};
      }
    }
    if (own.scale > 0.0f) {
      GRADFERRY_UNROLL
      for (uint32_t j = 0; j < kLaneElements; ++j) sink(j, signs.flip(own.scale, j), u[j]);
    } else {
      rare_path();  // the value itself, without a sign: 0 or NaN
      GRADFERRY_UNROLL
      for (uint32_t j = 0; j < kLaneElements; ++j) sink(j, own.scale);
    }
    return own.flags;
  }
};

using TileCodec = Rht;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht
