// The q4 codec on CPU.
//
// Encoding with error feedback moves 12.5 bytes per element: gradient in, residual in and out, half
// a byte of codes out. It is bound by memory as long as it stays under about 20 instructions per
// vector, so a group is handled in three passes over L1:
//   1. largest magnitude of each block, as integers (a NaN is larger than everything)
//   2. scales, with blocks in the lanes of a vector: 32 blocks share two or four divisions
//   3. codes and residual, with elements in the lanes: vectors j and j + 16 of a block meet in a
//   byte
#include "kernels/common/tile_driver.h"
#include "kernels/q4/q4_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

using q4::kGroupBlocks;
using q4::kHalfBlock;

// Where a group's bytes lie. T: std::byte or const std::byte.
template <typename T>
struct GroupBytes {
  T* codes;
  T* scales;
  T* exponent;
  uint32_t num_blocks;

  GRADFERRY_LANE GroupBytes(const Unit& unit, T* payload)
      : codes(payload + unit.first / 2),
        scales(payload + q4::scales_offset(unit.tile.num_elements) + unit.first / q4::kBlock),
        exponent(payload + q4::exponents_offset(unit.tile.num_elements) + unit.first / q4::kGroup),
        num_blocks(unit.padded / q4::kBlock) {}
};

struct GroupScales {
  alignas(64) float scale[kGroupBlocks];
  alignas(64) float reciprocal[kGroupBlocks];
};

// Largest magnitude of each block of v, zero for blocks that do not exist. Returns the group's.
GRADFERRY_LANE uint32_t block_maxima(const float* v, uint32_t num_blocks, uint32_t* maxima) {
  U32 largest(0u);
  for (uint32_t block = 0; block < num_blocks; ++block) {
    U32 m(0u);
    for (uint32_t i = 0; i < q4::kBlock; i += kLanes) {
      m = maximum(m, magnitude_bits(load(v + block * q4::kBlock + i)));
    }
    largest = maximum(largest, m);
    maxima[block] = reduce_maximum(m);
  }
  for (uint32_t block = num_blocks; block < kGroupBlocks; ++block) maxima[block] = 0;
  return reduce_maximum(largest);
}

// Writes the scale bytes and the exponent of a finite group.
GRADFERRY_LANE void encode_scales(const uint32_t* maxima, int32_t k,
                                  const GroupBytes<std::byte>& out, GroupScales* scales) {
  uint8_t scale_bytes[kGroupBlocks];
  U32 seen(0u);
  for (uint32_t block = 0; block < kGroupBlocks; block += kLanes) {
    const q4::BlockScale<F32> s = q4::block_scale(from_bits(load(maxima + block)), k);
    store_bytes(scale_bytes + block, s.code);
    store(scales->scale + block, s.scale);
    store(scales->reciprocal + block, s.reciprocal);
    seen = seen | s.code;
  }
  __builtin_memcpy(out.scales, scale_bytes, out.num_blocks);
  *out.exponent = std::byte(reduce_maximum(seen) == 0 ? 0 : k + q4::kExponentBias);
}

template <bool kKeepResidual>
GRADFERRY_LANE void encode_codes(const float* v, uint32_t num_blocks, const GroupScales& scales,
                                 std::byte* codes, float* residual) {
  auto* out = reinterpret_cast<uint8_t*>(codes);
  for (uint32_t block = 0; block < num_blocks; ++block) {
    const F32 scale(scales.scale[block]), reciprocal(scales.reciprocal[block]);
    for (uint32_t j = 0; j < kHalfBlock; j += kLanes) {
      const uint32_t i = block * q4::kBlock + j;
      const F32 low = load(v + i), high = load(v + i + kHalfBlock);
      const q4::Element<F32> l = q4::encode_element(low, scale, reciprocal);
      const q4::Element<F32> h = q4::encode_element(high, scale, reciprocal);
      store_bytes(out + block * kHalfBlock + j, l.code | (h.code << 4));
      if constexpr (kKeepResidual) {
        store(residual + i, low - l.value);
        store(residual + i + kHalfBlock, high - h.value);
      }
    }
  }
}

// Turns scale bytes into scales. Returns false if one of them, or the exponent, breaks the format.
GRADFERRY_LANE bool decode_scales(const GroupBytes<const std::byte>& in, uint32_t exponent,
                                  GroupScales* scales) {
  alignas(64) uint8_t scale_bytes[kGroupBlocks] = {};
  __builtin_memcpy(scale_bytes, in.scales, in.num_blocks);
  const int32_t k = static_cast<int32_t>(exponent) - q4::kExponentBias;
  const bool no_scales = exponent == 0 || exponent == q4::kNonFiniteExponent;
  if (!no_scales && (k < q4::kSmallestExponent || k > q4::kLargestExponent)) return false;
  const uint32_t largest = no_scales                   ? 0
                           : k == q4::kLargestExponent ? q4::kCappedScaleCode
                                                       : q4::kLargestScaleCode;
  U32 valid(~0u);
  for (uint32_t block = 0; block < kGroupBlocks; block += kLanes) {
    const U32 code = load_bytes(scale_bytes + block);
    const auto in_range = (code >= U32(q4::kSmallestScaleCode)) & (code <= U32(largest));
    valid = valid & select(in_range | (code == U32(0u)), U32(~0u), U32(0u));
    store(scales->scale + block, q4::decode_scale(code, k));
  }
  return reduce_maximum(valid ^ U32(~0u)) == 0;
}

template <typename Sink>
GRADFERRY_LANE void fill(uint32_t first, uint32_t end, float value, Sink sink) {
  for (uint32_t i = first; i < end; i += kLanes) sink(i, F32(value));
}

struct Q4 {
  static constexpr uint32_t kUnit = q4::kGroup;
  static constexpr uint32_t kBlock = q4::kBlock;

  static uint32_t payload_bytes(uint32_t n, ScalarType dtype, Stage stage,
                                const CodecOptions& options) {
    return q4::payload_bytes(n, dtype, stage, options);
  }

  static uint32_t encode(const Unit& unit, const float* v, std::byte* payload, float* residual) {
    const GroupBytes<std::byte> out(unit, payload);
    alignas(64) uint32_t maxima[kGroupBlocks];
    const uint32_t largest = block_maxima(v, out.num_blocks, maxima);
    if (largest >= kInfinityBits) {
      __builtin_memset(out.codes, 0, out.num_blocks * kHalfBlock);
      __builtin_memset(out.scales, 0, out.num_blocks);
      *out.exponent = std::byte(q4::kNonFiniteExponent);
      return kTileNonFinite;
    }
    GroupScales scales;
    encode_scales(maxima, q4::group_exponent(largest), out, &scales);
    if (residual != nullptr) {
      encode_codes<true>(v, out.num_blocks, scales, out.codes, residual);
    } else {
      encode_codes<false>(v, out.num_blocks, scales, out.codes, nullptr);
    }
    return 0;
  }

  template <typename Sink>
  static uint32_t decode(const Unit& unit, const std::byte* payload, Sink sink) {
    const GroupBytes<const std::byte> in(unit, payload);
    const uint32_t exponent = static_cast<uint32_t>(*in.exponent);
    GroupScales scales;
    const bool valid = decode_scales(in, exponent, &scales);
    if (!valid || exponent == q4::kNonFiniteExponent) {
      fill(0, unit.padded, from_bits(kNanBits), sink);
      return valid ? kTileNonFinite : kTileNonFinite | kTileCorrupt;
    }
    const auto* codes = reinterpret_cast<const uint8_t*>(in.codes);
    const Table16 table(q4::kCodeValues);
    for (uint32_t block = 0; block < in.num_blocks; ++block) {
      const uint32_t first = block * q4::kBlock;
      // Codes of a zero block mean nothing: a negative one would decode to -0.
      if (scales.scale[block] == 0.0f) {
        fill(first, first + q4::kBlock, 0.0f, sink);
        continue;
      }
      const F32 scale(scales.scale[block]);
      for (uint32_t j = 0; j < kHalfBlock; j += kLanes) {
        const U32 pair = load_bytes(codes + block * kHalfBlock + j);
        sink(first + j, lookup(table, pair) * scale);
        sink(first + j + kHalfBlock, lookup(table, pair >> 4) * scale);
      }
    }
    return 0;
  }
};

}  // namespace

extern const CodecFunctions q4_functions;
const CodecFunctions q4_functions = TileDriver<Q4>::functions();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
