// The q8 codec on CPU.
//
// Encoding with error feedback moves 13 bytes per element: gradient in, residual in and out, a byte
// of code out. It is bound by memory; a unit is handled in three passes over L1:
//   1. largest magnitude of each block, as integers (a NaN is larger than everything)
//   2. scales, with blocks in the lanes of a vector
//   3. codes and residual, with elements in the lanes
#include "kernels/common/scaled_blocks.h"
#include "kernels/q8/q8_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

using q8::kBlock;

struct UnitScales {
  alignas(64) uint32_t largest[kSlots];  // magnitude, as bits
  alignas(64) uint32_t code[kSlots];
  alignas(64) float scale[kSlots];
  alignas(64) float reciprocal[kSlots];
};

GRADFERRY_LANE void find_scales(const float* v, uint32_t num_blocks, UnitScales* scales) {
  for (uint32_t first = 0; first < kSlots; first += kLanes) {
    U32 largest[kLanes];
    for (uint32_t l = 0; l < kLanes; ++l) {
      largest[l] = U32(0u);
      if (first + l >= num_blocks) continue;
      const float* block = v + (first + l) * kBlock;
      for (uint32_t i = 0; i < kBlock; i += kLanes) {
        largest[l] = maximum(largest[l], magnitude_bits(load(block + i)));
      }
    }
    store(scales->largest + first, lane_maxima(largest));
  }
  for (uint32_t block = 0; block < kSlots; block += kLanes) {
    const q8::BlockScale<F32> s = q8::scale_of(from_bits(load(scales->largest + block)));
    store(scales->code + block, s.code);
    store(scales->scale + block, s.scale);
    store(scales->reciprocal + block, s.reciprocal);
  }
}

// Codes of the block that begins at element `first` of the unit.
template <bool kKeepResidual>
GRADFERRY_LANE void encode_codes(const Unit& unit, uint32_t first, const float* v, float scale,
                                 float reciprocal, std::byte* codes, float* residual) {
  auto* out = reinterpret_cast<uint8_t*>(codes);
  const F32 s(scale), r(reciprocal);
  for (uint32_t i = 0; i < kBlock; i += 32) {
    unit.ahead.prefetch_32(first + i);
    if (i % 64 == 0) unit.ahead.prefetch_output(codes + i);
    for (uint32_t l = i; l < i + 32; l += kLanes) {
      const F32 x = load(v + first + l);
      const q8::Element<F32> element = q8::encode_element(x, s, r);
      store_bytes(out + l, element.code);
      if constexpr (kKeepResidual) store(residual + first + l, x - element.value);
    }
  }
}

struct Codes {
  static constexpr uint32_t kCodesBytes = kBlock;
  static constexpr uint32_t kLargestScale = q8::kLargestScale;

  GRADFERRY_LANE static uint32_t scales_offset(uint32_t n) { return q8::scales_offset(n); }

  GRADFERRY_LANE static bool is_broken(const std::byte* codes, uint32_t num_bytes) {
    return has_byte(codes, num_bytes, q8::kBrokenCode);
  }
  GRADFERRY_LANE static F32 value(const std::byte* codes, uint32_t i, F32 scale) {
    return load_signed_bytes(reinterpret_cast<const int8_t*>(codes) + i) * scale;
  }
};

struct Q8 : ScaledBlocks<Codes> {
  static constexpr uint32_t kUnit = kUnitBlocks * q8::kBlock;
  static constexpr uint32_t kBlock = q8::kBlock;
  static constexpr bool kPrefetches = true;

  static constexpr decltype(Codec::payload_bytes) payload_bytes = &q8::payload_bytes;

  static uint32_t encode(const Unit& unit, const float* v, std::byte* payload, float* residual) {
    UnitScales scales;
    find_scales(v, unit.padded / kBlock, &scales);
    std::byte* out = payload + q8::scales_offset(unit.tile.num_elements);
    alignas(64) std::byte short_block[kBlock];
    uint32_t flags = 0;
    for (uint32_t first = 0; first < unit.num_elements; first += kBlock) {
      const uint32_t n = unit.num_elements - first;
      const uint32_t block = first / kBlock;
      std::byte* codes = n < kBlock ? short_block : payload + unit.first + first;
      uint32_t code = scales.code[block];
      if (scales.largest[block] >= kInfinityBits) {
        code = block_scale::kNonFinite;
        __builtin_memset(codes, 0, kBlock);
        flags = kTileNonFinite;
      } else if (residual != nullptr) {
        encode_codes<true>(unit, first, v, scales.scale[block], scales.reciprocal[block], codes,
                           residual);
      } else {
        encode_codes<false>(unit, first, v, scales.scale[block], scales.reciprocal[block], codes,
                            nullptr);
      }
      if (n < kBlock) {
        __builtin_memcpy(payload + unit.first + first, short_block, round_up(n, kChunk));
      }
      store_scale(out, unit.first / kBlock + block, code);
    }
    return flags;
  }
};

}  // namespace

extern const CodecFunctions q8_functions;
const CodecFunctions q8_functions = TileDriver<Q8>::functions();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
