// Decoding of codecs with a bf16 scale per block of 128 elements, see block_scale.h. The payload of
// a tile is the codes of its elements, block after block, then the scales. A codec supplies a class
//
//   kCodesBytes                       of the codes of a whole block
//   kLargestScale                     a scale above is corrupt
//   static uint32_t scales_offset(num_elements)
//   static bool is_broken(codes, num_bytes)
//                                     whether there is a code that no encoder writes; num_bytes is
//                                     a multiple of kCodesBytes
//   static F32 value(codes, i, scale) elements i .. i + kLanes - 1 of a block; of codes that are
//                                     zero bytes +0 if scale is 0, the canonical NaN if it is that
#pragma once

#include "kernels/common/block_scale.h"
#include "kernels/common/rank_sums.h"
#include "kernels/common/tile_driver.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

inline constexpr uint32_t kUnitBlocks = 8;
// Room for one number per block: scales are handled by whole vectors.
inline constexpr uint32_t kSlots = kUnitBlocks < kLanes ? kLanes : kUnitBlocks;

// Writes scale `index` of an array at any address, a bf16 pattern.
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
    return decode_term<Term>(unit, payload, sink);
  }
  template <typename Sink>
  static uint32_t sum(const Unit& unit, const std::byte* const* payload_by_rank, size_t offset,
                      uint32_t num_ranks, float* scratch, Sink sink) {
    return sum_terms<Term>(unit, payload_by_rank, offset, num_ranks, scratch, sink);
  }

 private:
  static constexpr uint32_t kBlock = block_scale::kBlock;
  static constexpr uint32_t kCodesBytes = Coding::kCodesBytes;

  // See rank_sums.h.
  struct Term {
    const std::byte* codes;
    alignas(64) float scales[kSlots];
    alignas(64) std::byte copy[kUnitBlocks * kCodesBytes];  // for codes that need mending

    GRADFERRY_LANE uint32_t find(const Unit& unit, const std::byte* payload) {
      const uint32_t num_blocks = unit.padded / kBlock;
      const uint32_t first = unit.first / kBlock;
      codes = payload + first * kCodesBytes;
      const std::byte* patterns =
          payload + Coding::scales_offset(unit.tile.num_elements) + first * sizeof(uint16_t);
      unit.ahead.prefetch_payload(patterns);
      if constexpr (kCodesBytes < 64) {
        for (uint32_t i = 0; i < sizeof(copy); i += 64) unit.ahead.prefetch_payload(codes + i);
      }
      alignas(64) uint16_t pattern[kSlots];
      for (uint16_t& p : pattern) p = block_scale::kSmallest;
      if (num_blocks == kUnitBlocks) {
        __builtin_memcpy(pattern, patterns, kUnitBlocks * sizeof(uint16_t));
      } else {
        __builtin_memcpy(pattern, patterns, num_blocks * sizeof(uint16_t));
      }
      bool sound = unit.num_elements == unit.padded;
      for (uint32_t i = 0; i < kSlots; i += kLanes) {
        const U32 x = load_halfwords(pattern + i);
        sound &= all((x >= U32(block_scale::kSmallest)) & (x <= U32(Coding::kLargestScale)));
        store(scales + i, bf16_to_float(x));
      }
      if (sound && !Coding::is_broken(codes, num_blocks * kCodesBytes)) return 0;
      return mend(unit, pattern);
    }

    template <typename Sink>
    [[gnu::noinline]] static void sum(const Unit& unit, const Term* terms, uint32_t count,
                                      const float* start, Sink sink) {
      constexpr uint32_t kSums = 8;  // vectors: half the registers of AVX2
      for (uint32_t i = 0; i < unit.padded; i += kSums * kLanes) {
        const uint32_t block = i / kBlock;
        const uint32_t within = i % kBlock;
        const auto value = [&](uint32_t rank, uint32_t k) {
          return Coding::value(terms[rank].codes + block * kCodesBytes, within + k * kLanes,
                               F32(terms[rank].scales[block]));
        };
        const auto prefetch_codes = [&](uint32_t rank) {
          if constexpr (kCodesBytes >= 64) {
            constexpr uint32_t kBytes = kSums * kLanes * kCodesBytes / kBlock;
            for (uint32_t p = 0; p < kBytes; p += 64) {
              unit.ahead.prefetch_payload(terms[rank].codes + i * kCodesBytes / kBlock + p);
            }
          }
        };
        F32 x[kSums];
        for (uint32_t k = 0; k < kSums; ++k) {
          x[k] = value(0, k);
          if (start != nullptr) x[k] = load(start + i + k * kLanes) + x[k];
        }
        prefetch_codes(0);
        for (uint32_t rank = 1; rank < count; ++rank) {
          prefetch_codes(rank);
          for (uint32_t k = 0; k < kSums; ++k) x[k] = x[k] + value(rank, k);
        }
        for (uint32_t k = 0; k < kSums; ++k) sink(i + k * kLanes, x[k]);
      }
    }

   private:
    // Blocks that end early, are zero or not finite, or break the format: codes without a meaning
    // become zero bytes, and scales what such codes decode to with value().
    [[gnu::noinline]] uint32_t mend(const Unit& unit, const uint16_t* pattern) {
      const uint32_t num_bytes = (unit.num_elements * kCodesBytes + kBlock - 1) / kBlock;
      __builtin_memset(copy, 0, sizeof(copy));
      __builtin_memcpy(copy, codes, num_bytes);
      codes = copy;
      uint32_t flags = 0;
      for (uint32_t block = 0; block < unit.padded / kBlock; ++block) {
        std::byte* block_codes = copy + block * kCodesBytes;
        const bool in_range =
            pattern[block] >= block_scale::kSmallest && pattern[block] <= Coding::kLargestScale;
        if (in_range && !Coding::is_broken(block_codes, kCodesBytes)) continue;
        __builtin_memset(block_codes, 0, kCodesBytes);
        if (pattern[block] == block_scale::kZero) continue;
        scales[block] = from_bits(kNanBits);
        flags |= pattern[block] == block_scale::kNonFinite ? kTileNonFinite
                                                           : kTileNonFinite | kTileCorrupt;
      }
      return flags;
    }
  };
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
