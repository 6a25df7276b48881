// The topk codec on CPU.
//
// Encoding with error feedback moves 12 bytes per element and a little: gradient in, residual in
// and out. The unit is a whole tile, whose fp32 copy (16 KB) stays in L1 while it is read three
// times: twice to choose (topk_select.h), once to become the residual, in which the k chosen
// elements are then put right. Decoding writes zeros, then k numbers.
#include "kernels/common/tile_driver.h"
#include "kernels/topk/topk_select.h"
#include "kernels/topk/topk_values.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

using topk::Chosen;
using topk::kMostKept;
using topk::Layout;

Layout layout_of(const Unit& unit) {
  return topk::layout_of(unit.tile.num_elements, unit.stage,
                         unit.batch.options->as<topk::Options>());
}

void encode_positions(const Layout& layout, const uint32_t* positions, std::byte* out) {
  alignas(64) uint8_t bytes[kTileElements / 8 + sizeof(uint32_t)] = {};
  if (layout.bitmap) {
    for (uint32_t j = 0; j < layout.k; ++j) {
      bytes[positions[j] / 8] |= static_cast<uint8_t>(1u << positions[j] % 8);
    }
  } else {
    // Each pair writes a byte more than its own three, which the next pair overwrites.
    uint32_t j = 0;
    for (; j + 2 <= layout.k; j += 2) {
      const uint32_t pair = positions[j] | positions[j + 1] << 12;
      __builtin_memcpy(bytes + j / 2 * 3, &pair, sizeof(pair));
    }
    if (j < layout.k) __builtin_memcpy(bytes + j / 2 * 3, positions + j, sizeof(uint32_t));
  }
  __builtin_memcpy(out, bytes, layout.positions_bytes);
}

// Unpacks 12-bit indices. Returns whether they increase, stay below n and leave spare bits zero.
bool decode_indices(const Layout& layout, const std::byte* in, uint16_t* positions) {
  alignas(64) uint8_t bytes[kTileElements / 8 + sizeof(uint32_t)];
  __builtin_memcpy(bytes, in, layout.positions_bytes);
  __builtin_memset(bytes + layout.positions_bytes, 0, sizeof(uint32_t));
  for (uint32_t j = 0; j < layout.k; j += 2) {
    uint32_t pair;
    __builtin_memcpy(&pair, bytes + j / 2 * 3, sizeof(pair));
    positions[j] = static_cast<uint16_t>(pair & 0xfffu);
    positions[j + 1] = static_cast<uint16_t>(pair >> 12 & 0xfffu);
  }
  bool valid = positions[layout.k - 1] < layout.num_elements;
  if (layout.k % 2 == 1) valid &= positions[layout.k] == 0;
  for (uint32_t j = 1; j < layout.k; ++j) valid &= positions[j - 1] < positions[j];
  return valid;
}

// Copies a bitmap, followed by zeros. Returns whether it has k ones, all below n.
bool decode_bitmap(const Layout& layout, const std::byte* in, uint64_t* words) {
  constexpr uint32_t kWords = kTileElements / 64;
  __builtin_memset(words, 0, kWords * sizeof(uint64_t));
  __builtin_memcpy(words, in, layout.positions_bytes);
  uint32_t count = 0;
  for (uint32_t i = 0; i < kWords; ++i) {
    count += static_cast<uint32_t>(__builtin_popcountll(words[i]));
  }
  const uint32_t n = layout.num_elements;
  const bool inside = n % 64 == 0 || words[n / 64] >> n % 64 == 0;
  return inside && count == layout.k;
}

template <typename Sink>
GRADFERRY_LANE void expand_values(const uint64_t* words, const float* values, uint32_t padded,
                                  Sink sink) {
  for (uint32_t i = 0; i < padded; i += kLanes) {
    const uint32_t ones = static_cast<uint32_t>(words[i / 64] >> i % 64) & ((1u << kLanes) - 1);
    sink(i, expand(load(values), lanes_of(ones)));
    values += __builtin_popcount(ones);
  }
}

// A tile that is not finite: NaN in the first bf16, or in the exponent of the one group; all other
// bytes zero.
void write_non_finite(const Layout& layout, std::byte* payload) {
  __builtin_memset(payload, 0, layout.values_bytes + layout.positions_bytes);
  if (layout.q4_values) {
    payload[layout.values_bytes - 1] = std::byte(e2m1::kNonFiniteExponent);
  } else {
    const uint16_t value = topk::kNonFiniteValue;
    __builtin_memcpy(payload, &value, sizeof(value));
  }
}

// A payload that is not k values at k positions: a tile of zeros, a tile that is not finite, or
// corrupt.
template <typename Sink>
uint32_t decode_special(const Layout& layout, uint32_t padded, const std::byte* payload,
                        Sink sink) {
  const uint32_t num_bytes = layout.values_bytes + layout.positions_bytes;
  if (all_zero(payload, num_bytes, ~uint64_t{0})) {
    fill(padded, 0.0f, sink);
    return 0;
  }
  fill(padded, from_bits(kNanBits), sink);
  std::byte non_finite[2 * kMostKept + kTileElements / 8];
  write_non_finite(layout, non_finite);
  const bool valid = __builtin_memcmp(payload, non_finite, num_bytes) == 0;
  return valid ? kTileNonFinite : kTileNonFinite | kTileCorrupt;
}

struct Topk {
  static constexpr uint32_t kUnit = kTileElements;
  static constexpr uint32_t kBlock = kChunk;
  static constexpr bool kPrefetches = true;

  static uint32_t payload_bytes(uint32_t n, ScalarType dtype, Stage stage,
                                const CodecOptions& options) {
    return topk::payload_bytes(n, dtype, stage, options);
  }

  static uint32_t encode(const Unit& unit, const float* v, std::byte* payload, float* residual) {
    const Layout layout = layout_of(unit);
    Chosen chosen;
    const auto prefetch_next = [&](uint32_t i) { unit.ahead.prefetch_32(i); };
    if (!topk::choose(v, unit.padded, layout.k, &chosen, prefetch_next)) {
      write_non_finite(layout, payload);
      return kTileNonFinite;
    }
    alignas(64) float withheld[topk::kValuesRoom];
    if (layout.q4_values) {
      topk::encode_e2m1(chosen.values, layout.k, payload, withheld);
    } else {
      topk::encode_bf16(chosen.values, layout.k, payload, withheld);
    }
    encode_positions(layout, chosen.positions, payload + layout.values_bytes);
    if (residual != nullptr) {
      for (uint32_t i = 0; i < unit.padded; i += kLanes) store(residual + i, load(v + i));
      for (uint32_t j = 0; j < layout.k; ++j) residual[chosen.positions[j]] = withheld[j];
    }
    return 0;
  }

  template <typename Sink>
  static uint32_t decode(const Unit& unit, const std::byte* payload, Sink sink) {
    const Layout layout = layout_of(unit);
    const std::byte* positions_bytes = payload + layout.values_bytes;
    alignas(64) float values[topk::kValuesRoom];
    const bool valid = layout.q4_values ? topk::decode_e2m1(payload, layout.k, values)
                                        : topk::decode_bf16(payload, layout.k, values);
    if (valid && layout.bitmap) {
      uint64_t words[kTileElements / 64];
      if (decode_bitmap(layout, positions_bytes, words)) {
        expand_values(words, values, unit.padded, sink);
        return 0;
      }
    } else if (valid) {
      uint16_t positions[kMostKept + 1];
      if (decode_indices(layout, positions_bytes, positions)) {
        give_sparsely(sink, unit.padded, [&](auto put) {
          for (uint32_t j = 0; j < layout.k; ++j) put(positions[j], values[j]);
        });
        return 0;
      }
    }
    return decode_special(layout, unit.padded, payload, sink);
  }
};

}  // namespace

extern const CodecFunctions topk_functions;
const CodecFunctions topk_functions = TileDriver<Topk>::functions();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
