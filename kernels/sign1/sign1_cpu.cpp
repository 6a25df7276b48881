// The sign1 codec on CPU.
//
// Encoding with error feedback moves 12.1 bytes per element: gradient in, residual in and out, one
// bit and a share of a scale out. It is bound by memory; a unit is handled in two passes over L1:
//   1. sums of the blocks, elements in the lanes, then scales, blocks in the lanes
//   2. signs and residual: a vector's signs leave it as bits of an integer
#include "kernels/common/scaled_blocks.h"
#include "kernels/common/sign_bits.h"
#include "kernels/common/tree_sums.h"
#include "kernels/sign1/sign1_layout.h"
#if defined(GRADFERRY_KERNEL_AVX512)
#include "kernels/sign1/sign1_sum.h"
#endif

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

using sign1::kBlock;

// sums[b] = sum of the summands of block b, +0 for blocks that do not exist.
GRADFERRY_LANE void block_sums(const float* v, uint32_t num_blocks, float* sums) {
  // Row b: the first levels of block b's tree.
  alignas(64) float rows[kUnitBlocks * kLanes];
  for (uint32_t b = 0; b < kUnitBlocks; ++b) {
    F32 row(0.0f);
    if (b < num_blocks) {
      const float* block = v + b * kBlock;
      row = tree_sums<kBlock>([&](uint32_t i) { return sign1::summand(load(block + i)); });
    }
    store(rows + b * kLanes, row);
  }
  // The other levels, for as many blocks as fill a vector.
  constexpr uint32_t kRows = kUnitBlocks < kLanes ? kUnitBlocks : kLanes;
  for (uint32_t b = 0; b < kUnitBlocks; b += kRows) {
    const float* first = rows + b * kLanes;
    F32 sum = tree_sums<kRows * kLanes>([&](uint32_t i) { return load(first + i); });
    for (uint32_t lanes = kRows; lanes < kLanes; lanes *= 2) sum = pair_sums(sum, F32(0.0f));
    store(sums + b, sum);
  }
}

// scales[b] from sums[b]; all blocks are whole but the last, which may be shorter.
GRADFERRY_LANE void scales_of(const float* sums, uint32_t num_elements, uint32_t* scales) {
  alignas(64) float shares[kSlots];
  for (float& share : shares) share = 1.0f;
  const uint32_t rest = num_elements % kBlock;
  if (rest != 0) shares[num_elements / kBlock] = static_cast<float>(rest) / kBlock;
  for (uint32_t b = 0; b < kSlots; b += kLanes) {
    store(scales + b, sign1::scale_of(load(sums + b), load(shares + b)));
  }
}

// Signs of the block that begins at element `first` of the unit. The zero block has none, and
// withholds everything.
template <bool kKeepResidual>
GRADFERRY_LANE void encode_signs(const Unit& unit, uint32_t first, const float* v, uint32_t scale,
                                 std::byte* signs, float* residual) {
  const U32 sign_mask(scale == block_scale::kZero ? 0 : kSignBit);
  const U32 magnitude(scale << 16);
  for (uint32_t i = 0; i < kBlock; i += 32) {
    unit.ahead.prefetch_32(first + i);
    uint32_t word = 0;
    for (uint32_t l = 0; l < 32; l += kLanes) {
      const F32 x = load(v + first + i + l);
      const U32 sign = bits(x) & sign_mask;
      word |= sign_bits(from_bits(sign)) << l;
      if constexpr (kKeepResidual) {
        store(residual + first + i + l, x - from_bits(sign | magnitude));
      }
    }
    __builtin_memcpy(signs + i / 8, &word, sizeof(word));
  }
}

struct Signs {
  static constexpr uint32_t kCodesBytes = kBlock / 8;
  static constexpr uint32_t kLargestScale = block_scale::kLargest;

  GRADFERRY_LANE static uint32_t scales_offset(uint32_t n) { return sign1::scales_offset(n); }
  GRADFERRY_LANE static bool is_broken(const std::byte*, uint32_t) { return false; }
  GRADFERRY_LANE static F32 value(const std::byte* signs, uint32_t i, F32 scale) {
    return flip_signs(scale, signs, i);
  }
};

struct Sign1 : ScaledBlocks<Signs> {
  using InOrder = ScaledBlocks<Signs>;
  static constexpr uint32_t kUnit = kUnitBlocks * sign1::kBlock;
  static constexpr uint32_t kBlock = sign1::kBlock;
  static constexpr bool kPrefetches = true;

  static constexpr decltype(Codec::payload_bytes) payload_bytes = &sign1::payload_bytes;

  static uint32_t encode(const Unit& unit, const float* v, std::byte* payload, float* residual) {
    alignas(64) float sums[kSlots];
    alignas(64) uint32_t scales[kSlots];
    block_sums(v, unit.padded / kBlock, sums);
    scales_of(sums, unit.num_elements, scales);
    std::byte* out = payload + sign1::scales_offset(unit.tile.num_elements);
    std::byte* all_signs = payload + unit.first / 8;
    alignas(16) std::byte short_block[kBlock / 8];
    uint32_t flags = 0;
    unit.ahead.prefetch_output(all_signs);
    unit.ahead.prefetch_output(all_signs + 64);
    for (uint32_t first = 0; first < unit.num_elements; first += kBlock) {
      const uint32_t n = unit.num_elements - first;
      const uint32_t block = first / kBlock;
      std::byte* signs = n < kBlock ? short_block : all_signs + first / 8;
      uint32_t scale = scales[block];
      if (is_not_finite(sums[block])) {
        scale = block_scale::kNonFinite;
        __builtin_memset(signs, 0, sizeof(short_block));
        flags = kTileNonFinite;
      } else if (residual != nullptr) {
        encode_signs<true>(unit, first, v, scale, signs, residual);
      } else {
        encode_signs<false>(unit, first, v, scale, signs, nullptr);
      }
      if (n < kBlock) __builtin_memcpy(all_signs + first / 8, short_block, (n + 15) / 16 * 2);
      store_scale(out, unit.first / kBlock + block, scale);
    }
    return flags;
  }

#if defined(GRADFERRY_KERNEL_AVX512)
  template <typename Sink>
  static uint32_t sum(const Unit& unit, const std::byte* const* payload_by_rank, size_t offset,
                      uint32_t num_ranks, float* scratch, Sink sink) {
    if (unit.num_elements == kUnit && num_ranks >= sign1::kFewestRanks &&
        num_ranks <= sign1::kMostRanks) {
      const std::byte *signs[sign1::kMostRanks], *scales[sign1::kMostRanks];
      for (uint32_t rank = 0; rank < num_ranks; ++rank) {
        const std::byte* payload = payload_by_rank[rank] + offset;
        signs[rank] = payload + unit.first / 8;
        scales[rank] = payload + sign1::scales_offset(unit.tile.num_elements) +
                       unit.first / kBlock * sizeof(uint16_t);
        unit.ahead.prefetch_payload(scales[rank]);
      }
      sign1::IntegerScales integers;
      if (integers.find(scales, num_ranks)) {
        sign1::sum_integers(integers, signs, num_ranks, kUnitBlocks, unit.ahead, sink);
        return 0;
      }
    }
    return InOrder::sum(unit, payload_by_rank, offset, num_ranks, scratch, sink);
  }
#endif
};

}  // namespace

extern const CodecFunctions sign1_functions;
const CodecFunctions sign1_functions = TileDriver<Sign1>::functions();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
