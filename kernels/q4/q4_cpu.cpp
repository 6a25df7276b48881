// The q4 codec on CPU.
//
// Encoding with error feedback moves 12.5 bytes per element: gradient in, residual in and out, half
// a byte of codes out. It is bound by memory as long as it stays under about 40 instructions per
// vector of 16, so a group is handled in three passes over L1:
//   1. largest magnitude of each block, as integers (a NaN is larger than everything)
//   2. scales, with blocks in the lanes of a vector: 32 blocks share two or four divisions
//   3. codes and residual, with elements in the lanes; what comes next is prefetched here, in step
// Adding the payloads of W ranks stays in registers: blocks outside, ranks inside.
#include "kernels/common/rank_sums.h"
#include "kernels/common/tile_driver.h"
#include "kernels/q4/q4_layout.h"
#include "kernels/q4/q4_pack.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

using q4::kGroupBlocks;
using q4::kHalfBlock;

constexpr uint32_t kBlockVectors = q4::kBlock / kLanes;
constexpr uint32_t kLineElements = 128;  // their codes fill a cache line

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

struct EncodeScales {
  alignas(64) float half_scale[kGroupBlocks];
  alignas(64) float reciprocal[kGroupBlocks];
};

// Largest magnitude of each block of v, zero for blocks that do not exist. Returns the group's.
GRADFERRY_LANE uint32_t block_maxima(const float* v, uint32_t num_blocks, uint32_t* maxima) {
  U32 largest(0u);
  for (uint32_t first = 0; first < kGroupBlocks; first += kLanes) {
    U32 block_largest[kLanes];
    for (uint32_t l = 0; l < kLanes; ++l) {
      U32 m(0u);
      if (first + l < num_blocks) {
        const float* block = v + (first + l) * q4::kBlock;
        for (uint32_t i = 0; i < q4::kBlock; i += kLanes) {
          m = maximum(m, magnitude_bits(load(block + i)));
        }
      }
      block_largest[l] = m;
    }
    const U32 m = lane_maxima(block_largest);
    store(maxima + first, m);
    largest = maximum(largest, m);
  }
  return reduce_maximum(largest);
}

// Writes the scale bytes and the exponent of a finite group.
GRADFERRY_LANE void encode_scales(const uint32_t* maxima, int32_t k,
                                  const GroupBytes<std::byte>& out, EncodeScales* scales) {
  uint8_t scale_bytes[kGroupBlocks];
  U32 seen(0u);
  for (uint32_t block = 0; block < kGroupBlocks; block += kLanes) {
    const q4::BlockScale<F32> s = q4::block_scale(from_bits(load(maxima + block)), k);
    store_bytes(scale_bytes + block, s.code);
    store(scales->half_scale + block, s.half_scale);
    store(scales->reciprocal + block, s.reciprocal);
    seen = seen | s.code;
  }
  __builtin_memcpy(out.scales, scale_bytes, out.num_blocks);
  *out.exponent = std::byte(reduce_maximum(seen) == 0 ? 0 : k + q4::kExponentBias);
}

template <bool kKeepResidual>
GRADFERRY_LANE void encode_codes(const Unit& unit, const float* v, const EncodeScales& scales,
                                 std::byte* codes, float* residual) {
  const q4::Packer packer;
  for (uint32_t i = 0; i < unit.padded; i += q4::kBlock) {
    unit.ahead.prefetch_32(i);
    if (i % kLineElements == 0) unit.ahead.prefetch_output(codes + i / 2);
    const F32 half_scale(scales.half_scale[i / q4::kBlock]);
    const F32 reciprocal(scales.reciprocal[i / q4::kBlock]);
    F32 doubled[kBlockVectors];
    for (uint32_t j = 0; j < kBlockVectors; ++j) {
      const F32 x = load(v + i + j * kLanes);
      doubled[j] = q4::nearest_doubled(x, reciprocal);
      if constexpr (kKeepResidual) store(residual + i + j * kLanes, x - doubled[j] * half_scale);
    }
    packer.pack(doubled, reinterpret_cast<uint8_t*>(codes) + i / 2);
  }
}

// One rank's group, see rank_sums.h.
struct Term {
  const std::byte* codes;
  alignas(64) float scales[kGroupBlocks];
  alignas(64) std::byte copy[kGroupBlocks * kHalfBlock];  // for codes that need mending

  GRADFERRY_LANE uint32_t find(const Unit& unit, const std::byte* payload) {
    const GroupBytes<const std::byte> in(unit, payload);
    unit.ahead.prefetch_payload(in.scales);
    codes = in.codes;
    const uint32_t exponent = static_cast<uint32_t>(*in.exponent);
    const int32_t k = static_cast<int32_t>(exponent) - q4::kExponentBias;
    const bool has_scales = k >= q4::kSmallestExponent && k <= q4::kLargestExponent;
    const uint32_t largest = !has_scales                 ? 0
                             : k == q4::kLargestExponent ? q4::kCappedScaleCode
                                                         : q4::kLargestScaleCode;
    alignas(64) uint8_t scale_bytes[kGroupBlocks] = {};
    if (in.num_blocks == kGroupBlocks) {
      __builtin_memcpy(scale_bytes, in.scales, kGroupBlocks);
    } else {
      __builtin_memcpy(scale_bytes, in.scales, in.num_blocks);
    }
    bool valid = has_scales || exponent == 0 || exponent == q4::kNonFiniteExponent;
    bool any_zero = false;
    for (uint32_t block = 0; block < kGroupBlocks; block += kLanes) {
      const U32 code = load_bytes(scale_bytes + block);
      const auto zero = code == U32(0u);
      valid &= all(zero | ((code >= U32(q4::kSmallestScaleCode)) & (code <= U32(largest))));
      any_zero |= any(zero);
      store(scales + block, q4::decode_scale(code, k));
    }
    if (valid && !any_zero) return 0;
    return mend(in, valid && exponent != q4::kNonFiniteExponent, valid);
  }

  template <typename Sink>
  [[gnu::noinline]] static void sum(const Unit& unit, const Term* terms, uint32_t count,
                                    const float* start, Sink sink) {
    const q4::Unpacker unpacker;
    for (uint32_t i = 0; i < unit.padded; i += q4::kBlock) {
      if (i % kLineElements == 0) {
        for (uint32_t rank = 0; rank < count; ++rank) {
          unit.ahead.prefetch_payload(terms[rank].codes + i / 2);
        }
      }
      const auto unpack = [&](uint32_t rank, F32(&x)[kBlockVectors]) {
        unpacker.unpack(terms[rank].codes + i / 2, F32(terms[rank].scales[i / q4::kBlock]), x);
      };
      F32 s[kBlockVectors];
      unpack(0, s);
      if (start != nullptr) {
        for (uint32_t j = 0; j < kBlockVectors; ++j) s[j] = load(start + i + j * kLanes) + s[j];
      }
      for (uint32_t rank = 1; rank < count; ++rank) {
        F32 x[kBlockVectors];
        unpack(rank, x);
        for (uint32_t j = 0; j < kBlockVectors; ++j) s[j] = s[j] + x[j];
      }
      for (uint32_t j = 0; j < kBlockVectors; ++j) sink(i + j * kLanes, s[j]);
    }
  }

 private:
  // Codes of a zero block are replaced by zero bytes, because a negative one would decode to -0. A
  // non-finite group is zero codes times NaN.
  [[gnu::noinline]] uint32_t mend(const GroupBytes<const std::byte>& in, bool finite, bool valid) {
    for (uint32_t block = 0; block < in.num_blocks; ++block) {
      std::byte* to = copy + block * kHalfBlock;
      if (finite && scales[block] != 0.0f) {
        __builtin_memcpy(to, codes + block * kHalfBlock, kHalfBlock);
      } else {
        __builtin_memset(to, 0, kHalfBlock);
      }
      if (!finite) scales[block] = from_bits(kNanBits);
    }
    codes = copy;
    if (finite) return 0;
    return valid ? kTileNonFinite : kTileNonFinite | kTileCorrupt;
  }
};

struct Q4 {
  static constexpr uint32_t kUnit = q4::kGroup;
  static constexpr uint32_t kBlock = q4::kBlock;
  static constexpr bool kPrefetches = true;

  static constexpr decltype(Codec::payload_bytes) payload_bytes = &q4::payload_bytes;

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
    EncodeScales scales;
    encode_scales(maxima, q4::group_exponent(largest), out, &scales);
    if (residual != nullptr) {
      encode_codes<true>(unit, v, scales, out.codes, residual);
    } else {
      encode_codes<false>(unit, v, scales, out.codes, nullptr);
    }
    return 0;
  }

  template <typename Sink>
  static uint32_t decode(const Unit& unit, const std::byte* payload, Sink sink) {
    return decode_term<Term>(unit, payload, sink);
  }
  template <typename Sink>
  static uint32_t sum(const Unit& unit, const std::byte* const* payload_by_rank, size_t offset,
                      uint32_t num_ranks, float* scratch, Sink sink) {
    return sum_terms<Term>(unit, payload_by_rank, offset, num_ranks, scratch, sink);
  }
};

}  // namespace

extern const CodecFunctions q4_functions;
const CodecFunctions q4_functions = TileDriver<Q4>::functions();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
