// Decoding of codecs with a bf16 scale per block of 128 elements, see block_scale.h. The payload of
// a tile is the codes of its elements, block after block, then the scales. A codec supplies a class
//
//   kCodesBytes                       of the codes of a whole block
//   kLargestScale                     a scale above is corrupt
//   static uint32_t scales_offset(num_elements)
//   static bool is_broken(codes)      whether a whole block has a code that no encoder writes
//   static F32 value(codes, i, scale) elements i .. i + kLanes - 1 of a block; of codes that are
//                                     zero bytes +0 if scale is 0, the canonical NaN if it is that
#pragma once

#include "kernels/common/block_scale.h"
#include "kernels/common/tile_driver.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Scale `index` of an array at any address, as a bf16 pattern.
GRADFERRY_LANE uint32_t load_scale(const std::byte* scales, uint32_t index) {
  uint16_t scale;
  __builtin_memcpy(&scale, scales + index * sizeof(scale), sizeof(scale));
  return scale;
}
GRADFERRY_LANE void store_scale(std::byte* scales, uint32_t index, uint32_t value) {
  const auto scale = static_cast<uint16_t>(value);
  __builtin_memcpy(scales + index * sizeof(scale), &scale, sizeof(scale));
}

template <typename Coding>
class ScaledBlocks {
 public:
  // decode and sum: see tile_driver.h.
  template <typename Sink>
  static uint32_t decode(const Unit& unit, const std::byte* payload, Sink sink) {
    uint32_t flags = 0;
    for (uint32_t first = 0; first < unit.padded; first += kBlock) {
      Term term;
      flags |= term.find(unit, first, payload);
      for (uint32_t i = 0; i < kBlock; i += kLanes) {
        sink(first + i, Coding::value(term.codes, i, F32(term.scale)));
      }
    }
    return flags;
  }

  // A few vectors of sums stay in registers while the ranks pass by.
  template <typename Sink>
  static uint32_t sum(const Unit& unit, const std::byte* const* payload_by_rank, size_t offset,
                      uint32_t num_ranks, float* scratch, Sink sink) {
    uint32_t flags = 0;
    for (uint32_t first = 0; first < unit.padded; first += kBlock) {
      float* sums = scratch + first;
      for (uint32_t rank = 0; rank < num_ranks; rank += kRanksAtOnce) {
        const uint32_t rest = num_ranks - rank;
        const uint32_t count = rest < kRanksAtOnce ? rest : kRanksAtOnce;
        Term terms[kRanksAtOnce];
        for (uint32_t i = 0; i < count; ++i) {
          flags |= terms[i].find(unit, first, payload_by_rank[rank + i] + offset);
        }
        add_terms(terms, count, rank == 0, sums);
      }
      for (uint32_t i = 0; i < kBlock; i += kLanes) sink(first + i, load(sums + i));
    }
    return flags;
  }

 private:
  static constexpr uint32_t kBlock = block_scale::kBlock;
  static constexpr uint32_t kSums = 8;  // half the registers of AVX2
  static constexpr uint32_t kRanksAtOnce = 8;
  alignas(16) static constexpr std::byte kNoCodes[Coding::kCodesBytes] = {};

  // What a block decodes from. Blocks without numbers have zero bytes for codes and scale 0 or NaN.
  struct Term {
    const std::byte* codes;
    float scale;
    alignas(16) std::byte copy[Coding::kCodesBytes];  // of the codes of a short block

    // Block from element `first` of the unit on. Returns kTile* flags.
    GRADFERRY_LANE uint32_t find(const Unit& unit, uint32_t first, const std::byte* payload) {
      const uint32_t block = (unit.first + first) / kBlock;
      const uint32_t position = block * Coding::kCodesBytes;
      codes = payload + position;
      if (position % 64 == 0) {
        for (uint32_t i = 0; i < Coding::kCodesBytes; i += 64) {
          unit.ahead.prefetch_payload(codes + i);
        }
      }
      const uint32_t n = unit.num_elements - first;
      if (n < kBlock) {
        __builtin_memset(copy, 0, sizeof(copy));
        __builtin_memcpy(copy, codes, (n * Coding::kCodesBytes + kBlock - 1) / kBlock);
        codes = copy;
      }
      return apply(load_scale(payload + Coding::scales_offset(unit.tile.num_elements), block));
    }

   private:
    GRADFERRY_LANE uint32_t apply(uint32_t pattern) {
      const bool in_range = pattern >= block_scale::kSmallest && pattern <= Coding::kLargestScale;
      if (in_range && !Coding::is_broken(codes)) {
        scale = from_bits(pattern << 16);
        return 0;
      }
      codes = kNoCodes;
      scale = from_bits(pattern == block_scale::kZero ? 0 : kNanBits);
      if (pattern == block_scale::kZero) return 0;
      return pattern == block_scale::kNonFinite ? kTileNonFinite : kTileNonFinite | kTileCorrupt;
    }
  };

  // Adds terms to the sums of a block; the first term of all is not added to anything.
  GRADFERRY_LANE static void add_terms(const Term* terms, uint32_t count, bool is_first,
                                       float* sums) {
    for (uint32_t piece = 0; piece < kBlock; piece += kSums * kLanes) {
      F32 x[kSums];
      for (uint32_t k = 0; k < kSums; ++k) {
        const uint32_t i = piece + k * kLanes;
        x[k] = Coding::value(terms[0].codes, i, F32(terms[0].scale));
        if (!is_first) x[k] = load(sums + i) + x[k];
      }
      for (uint32_t rank = 1; rank < count; ++rank) {
        const F32 scale(terms[rank].scale);
        for (uint32_t k = 0; k < kSums; ++k) {
          x[k] = x[k] + Coding::value(terms[rank].codes, piece + k * kLanes, scale);
        }
      }
      for (uint32_t k = 0; k < kSums; ++k) store(sums + piece + k * kLanes, x[k]);
    }
  }
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
