// The rht codec on CPU.
//
// Arithmetic is the limit, not memory, so nothing waits for a scalar: a unit is handled in passes
// over the L1 cache, and square roots, quotients, random numbers and scales are computed with
// blocks in the lanes of a vector. Encoding:
//   1. energy of each block (its sum of squares); square roots
//   2. transform, codes, the products that make the scale, and half of the transform back
//   3. scales
//   4. the other half of the transform back, times the scale; residual
#include "kernels/common/tile_driver.h"
#include "kernels/rht/rht_codes.h"
#include "kernels/rht/rht_layout.h"
#include "kernels/rht/rht_sum.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

using rht::kBlock;
using rht::kGroup;
using rht::kGroupVectors;

constexpr uint32_t kUnitBlocks = 8;
constexpr uint32_t kBlockLanes = kUnitBlocks > kLanes ? kUnitBlocks : kLanes;  // whole vectors

// Four words of random signs per block.
struct Signs {
  alignas(64) uint32_t words[kBlockLanes][4];

  GRADFERRY_LANE explicit Signs(const Unit& unit) {
    const uint64_t first = unit.tile.id * rht::kTileBlocks + unit.first / kBlock;
    for (uint32_t block = 0; block < kUnitBlocks; block += kLanes) {
      alignas(64) uint32_t lane[kLanes], word[4][kLanes];
      for (uint32_t l = 0; l < kLanes; ++l) lane[l] = l;
      const auto random =
          rht::random_signs(unit.batch.seed, unit.batch.step, first + block, load(lane));
      for (uint32_t i = 0; i < 4; ++i) store(word[i], random.word[i]);
      for (uint32_t l = 0; l < kLanes; ++l) {
        for (uint32_t i = 0; i < 4; ++i) words[block + l][i] = word[i][l];
      }
    }
  }
};

// What the passes of encode tell each other about each block.
struct Blocks {
  alignas(64) float root[kBlockLanes];                // square root of the energy
  alignas(64) float projection[kUnitBlocks][kLanes];  // <z, c>, but for the sum over lanes
  alignas(64) float power[kUnitBlocks][kLanes];       // <c, c>, likewise
  alignas(64) uint32_t biased_exponent[kBlockLanes];  // k, see block_scale
  alignas(64) uint32_t scale[kBlockLanes];            // as fp32 bits; 0: the block is zero
  alignas(64) float back[kUnitBlocks * kBlock];       // codebook values, groups transformed back
  bool coded[kUnitBlocks];                            // false: zero or not finite
  bool finite[kUnitBlocks];

  GRADFERRY_LANE int32_t exponent(uint32_t block) const {
    return static_cast<int32_t>(biased_exponent[block] - rht::kExponentBias);
  }
};

// Energies outside of the plain range: 2^-k comes in, or the block is zero or not finite.
[[gnu::noinline]] float unusual_energy(const float* v, uint32_t block, Blocks* blocks) {
  U32 largest(0u);
  for (uint32_t i = 0; i < kBlock; i += kLanes) {
    largest = maximum(largest, magnitude_bits(load(v + i)));
  }
  const uint32_t m = reduce_maximum(largest);
  blocks->finite[block] = m < kInfinityBits;
  blocks->coded[block] = blocks->finite[block] && m != 0;
  if (!blocks->coded[block]) return 0.0f;
  const int32_t k = rht::block_exponent(m);
  blocks->biased_exponent[block] = static_cast<uint32_t>(k) + rht::kExponentBias;
  const F32 factor(rht::power_of_two(-k));
  return rht::block_sum([&](uint32_t i) {
    const F32 x = load(v + i) * factor;
    return x * x;
  });
}

GRADFERRY_LANE void measure_blocks(const float* v, uint32_t num_blocks, Blocks* blocks) {
  alignas(64) float energy[kBlockLanes] = {};
  for (uint32_t& exponent : blocks->biased_exponent) exponent = rht::kExponentBias;
  for (uint32_t block = 0; block < num_blocks; ++block) {
    const float* x = v + block * kBlock;
    blocks->coded[block] = blocks->finite[block] = true;
    energy[block] = rht::block_sum([&](uint32_t i) { return load(x + i) * load(x + i); });
    const bool plain =
        energy[block] >= rht::kSmallestPlainEnergy && energy[block] <= rht::kLargestPlainEnergy;
    if (!plain) energy[block] = unusual_energy(x, block, blocks);
  }
  for (uint32_t block = 0; block < kUnitBlocks; block += kLanes) {
    store(blocks->root + block, square_root(load(energy + block)));
  }
}

// Codes one block of coordinates and replaces them by their codebook values, four vectors at a
// time: enough independent steps to hide how long each takes.
template <uint32_t kBits>
GRADFERRY_LANE void code_block(float* z, uint32_t block, std::byte* out, Blocks* blocks) {
  using Codebook = rht::Codebook<kBits>;
  const Table8 magnitudes(Codebook::kMagnitudes);
  const Table8 cuts = scaled(Table8(Codebook::kCuts), blocks->root[block]);
  F32 cut[7], projection[kGroupVectors], power(0.0f);
  // Only those that magnitude_indices asks for are computed.
  for (uint32_t i = 0; i < 7; ++i) cut[i] = F32(Codebook::kCuts[i] * blocks->root[block]);
  for (uint32_t j = 0; j < kGroup; j += kLanes) {
    F32 magnitude[4], value[4];
    U32 sign[4], index[4];
    for (uint32_t k = 0; k < 4; ++k) {
      const F32 x = load(z + j + k * kGroup);
      magnitude[k] = from_bits(magnitude_bits(x));
      sign[k] = bits(x) & U32(kSignBit);
    }
    rht::magnitude_indices<kBits, 4>(magnitude, cut, cuts, index);
    for (uint32_t k = 0; k < 4; ++k) value[k] = lookup(magnitudes, index[k]);
    for (uint32_t k = 0; k < 4; ++k) {
      store(z + j + k * kGroup, from_bits(bits(value[k]) | sign[k]));
      magnitude[k] = magnitude[k] * value[k];
      value[k] = value[k] * value[k];
    }
    projection[j / kLanes] = (magnitude[0] + magnitude[2]) + (magnitude[1] + magnitude[3]);
    power = power + ((value[0] + value[2]) + (value[1] + value[3]));
    rht::store_codes<kBits>(j, index, sign, out);
  }
  store(blocks->projection[block], rht::sum_vectors(projection, kGroupVectors));
  store(blocks->power[block], power);
}

// Transforms and codes one block, x. kKeepBack: for the residual.
template <uint32_t kBits, bool kKeepBack>
GRADFERRY_LANE void encode_block(const float* x, const uint32_t* signs, uint32_t block,
                                 std::byte* out, Blocks* blocks) {
  alignas(64) float y[kBlock], z[kBlock];
  rht::butterfly_columns_of_block([&](uint32_t i) { return flip_signs(load(x + i), signs, i); },
                                  [&](uint32_t i, F32 value) { store(y + i, value); });
  for (uint32_t group = 0; group < kBlock; group += kGroup) {
    rht::transform_group(y + group, z + group);
  }
  code_block<kBits>(z, block, out, blocks);
  if constexpr (kKeepBack) rht::transform_groups_back(z, blocks->back + block * kBlock);
}

// Where values or residuals may overflow: lowers the scale until no value does, and leaves the
// residual alone where it would.
[[gnu::noinline]] uint32_t finish_huge_block(const float* v, const float* back,
                                             const uint32_t* signs, uint32_t scale,
                                             float* residual) {
  while (!rht::is_finite_block(back, scale, signs)) scale -= 0x10000u;
  if (residual == nullptr) return scale;
  rht::finish_block(back, scale, signs, [&](uint32_t i, F32 value) {
    const F32 withheld = load(v + i) - value;
    store(residual + i, select(is_not_finite(withheld), load(residual + i), withheld));
  });
  return scale;
}

// Passes 1 to 3: everything but scale bytes and residuals.
template <uint32_t kBits, bool kKeepBack>
GRADFERRY_LANE void encode_blocks(const Unit& unit, const float* v, const Signs& signs,
                                  const rht::UnitBytes<std::byte>& out, Blocks* blocks) {
  measure_blocks(v, out.num_blocks, blocks);
  for (uint32_t block = 0; block < out.num_blocks; ++block) {
    for (uint32_t i = 0; i < kBlock; i += 32) unit.ahead.prefetch_32(block * kBlock + i);
    if (!blocks->coded[block]) continue;
    const float* x = v + block * kBlock;
    alignas(64) float rescaled[kBlock];
    const int32_t k = blocks->exponent(block);
    if (k != 0) {
      const F32 factor(rht::power_of_two(-k));
      for (uint32_t i = 0; i < kBlock; i += kLanes) store(rescaled + i, load(x + i) * factor);
      x = rescaled;
    }
    encode_block<kBits, kKeepBack>(x, signs.words[block], block, out.codes_of(block), blocks);
  }
  alignas(64) float projection[kBlockLanes] = {}, power[kBlockLanes] = {};
  for (uint32_t block = 0; block < out.num_blocks; ++block) {
    power[block] = 1.0f;
    if (!blocks->coded[block]) continue;
    projection[block] = halving_sum(load(blocks->projection[block]));
    power[block] = halving_sum(load(blocks->power[block]));
  }
  for (uint32_t block = 0; block < kUnitBlocks; block += kLanes) {
    store(blocks->scale + block, rht::block_scale(load(projection + block), load(power + block),
                                                  load(blocks->biased_exponent + block)));
  }
}

template <uint32_t kBits>
uint32_t encode_unit(const Unit& unit, const float* v, std::byte* payload, float* residual) {
  const rht::UnitBytes<std::byte> out(unit, kBits, payload);
  const Signs signs(unit);
  Blocks blocks;
  if (residual != nullptr) {
    encode_blocks<kBits, true>(unit, v, signs, out, &blocks);
  } else {
    encode_blocks<kBits, false>(unit, v, signs, out, &blocks);
  }
  uint32_t flags = 0;
  for (uint32_t block = 0; block < out.num_blocks; ++block) {
    const float* x = v + block * kBlock;
    const uint32_t* words = signs.words[block];
    float* back = blocks.back + block * kBlock;
    float* r = residual == nullptr ? nullptr : residual + block * kBlock;
    uint32_t scale = blocks.finite[block] ? blocks.scale[block] : kNanBits;
    if (!blocks.finite[block] || scale == 0) {
      __builtin_memset(out.codes_of(block), 0, rht::code_bytes(kBits));
      if (!blocks.finite[block]) {
        flags = kTileNonFinite;
      } else if (r != nullptr) {
        __builtin_memcpy(r, x, kBlock * sizeof(float));
      }
    } else if (blocks.exponent(block) >= rht::kHugeExponent) {
      alignas(64) float z[kBlock];
      rht::load_codes<kBits>(out.codes_of(block), z);
      rht::transform_groups_back(z, back);
      scale = finish_huge_block(x, back, words, scale, r);
    } else if (r != nullptr) {
      rht::finish_block(back, scale, words,
                        [&](uint32_t i, F32 value) { store(r + i, load(x + i) - value); });
    }
    out.set_scale(block, scale);
  }
  return flags;
}

template <uint32_t kBits, typename Sink>
GRADFERRY_LANE uint32_t decode_block(const std::byte* codes, uint32_t scale, const uint32_t* words,
                                     Sink sink) {
  alignas(64) float back[kBlock];
  bool valid = scale >= rht::kSmallestScale && scale <= rht::kLargestScale;
  if (valid) {
    alignas(64) float z[kBlock];
    rht::load_codes<kBits>(codes, z);
    rht::transform_groups_back(z, back);
  }
  if (valid && scale >= rht::kOverflowingScale) valid = rht::is_finite_block(back, scale, words);
  if (valid) {
    rht::finish_block(back, scale, words, sink);
    return 0;
  }
  const F32 value(scale == 0 ? 0.0f : from_bits(kNanBits));
  for (uint32_t i = 0; i < kBlock; i += kLanes) sink(i, value);
  if (scale == 0) return 0;
  return scale == kNanBits ? kTileNonFinite : kTileNonFinite | kTileCorrupt;
}

template <uint32_t kBits, typename Sink>
uint32_t decode_unit(const Unit& unit, const std::byte* payload, Sink sink) {
  const rht::UnitBytes<const std::byte> in(unit, kBits, payload);
  const Signs signs(unit);
  uint32_t flags = 0;
  for (uint32_t block = 0; block < in.num_blocks; ++block) {
    flags |= decode_block<kBits>(in.codes_of(block), in.scale(block), signs.words[block],
                                 [&](uint32_t i, F32 value) { sink(block * kBlock + i, value); });
  }
  return flags;
}

template <uint32_t kBits, typename Sink>
uint32_t sum_units(const Unit& unit, const std::byte* const* payload_by_rank, size_t offset,
                   uint32_t num_ranks, Sink sink) {
  const Signs signs(unit);
  uint32_t flags = 0;
  for (uint32_t block = 0; block < unit.padded / kBlock; ++block) {
    const auto rank_block = [&](uint32_t rank) {
      const rht::UnitBytes<const std::byte> in(unit, kBits, payload_by_rank[rank] + offset);
      unit.ahead.prefetch_payload(in.codes_of(block));
      return rht::RankBlock{in.codes_of(block), in.scale(block)};
    };
    const uint32_t* words = signs.words[block];
    const auto give = [&](uint32_t i, F32 sum) { sink(block * kBlock + i, sum); };
    rht::RankBlock ranks[rht::kMostRanks];
    for (uint32_t rank = 0; rank < num_ranks && rank < rht::kMostRanks; ++rank) {
      ranks[rank] = rank_block(rank);
    }
    if (num_ranks <= rht::kMostRanks && rht::sum_transformed<kBits>(ranks, num_ranks, words, give))
      continue;
    alignas(64) float sums[kBlock];
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      const rht::RankBlock in = rank_block(rank);
      if (rank == 0) {
        flags |= decode_block<kBits>(in.codes, in.scale, words, StoreSink{sums});
      } else {
        flags |= decode_block<kBits>(in.codes, in.scale, words, AddSink{sums});
      }
    }
    for (uint32_t i = 0; i < kBlock; i += kLanes) give(i, load(sums + i));
  }
  return flags;
}

struct Rht {
  static constexpr uint32_t kUnit = kUnitBlocks * rht::kBlock;
  static constexpr uint32_t kBlock = rht::kBlock;
  static constexpr bool kPrefetches = true;

  static constexpr decltype(Codec::payload_bytes) payload_bytes = &rht::payload_bytes;
  static uint32_t encode(const Unit& unit, const float* v, std::byte* payload, float* residual) {
    switch (unit.batch.options->as<rht::Options>().bits) {
      case 2: return encode_unit<2>(unit, v, payload, residual);
      case 3: return encode_unit<3>(unit, v, payload, residual);
      default: return encode_unit<4>(unit, v, payload, residual);
    }
  }
  template <typename Sink>
  static uint32_t decode(const Unit& unit, const std::byte* payload, Sink sink) {
    switch (unit.batch.options->as<rht::Options>().bits) {
      case 2: return decode_unit<2>(unit, payload, sink);
      case 3: return decode_unit<3>(unit, payload, sink);
      default: return decode_unit<4>(unit, payload, sink);
    }
  }
  template <typename Sink>
  static uint32_t sum(const Unit& unit, const std::byte* const* payload_by_rank, size_t offset,
                      uint32_t num_ranks, float*, Sink sink) {
    switch (unit.batch.options->as<rht::Options>().bits) {
      case 2: return sum_units<2>(unit, payload_by_rank, offset, num_ranks, sink);
      case 3: return sum_units<3>(unit, payload_by_rank, offset, num_ranks, sink);
      default: return sum_units<4>(unit, payload_by_rank, offset, num_ranks, sink);
    }
  }
};

}  // namespace

extern const CodecFunctions rht_functions;
const CodecFunctions rht_functions = TileDriver<Rht>::functions();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
