// The topk codec on CPU.
//
// Encoding with error feedback moves 12 bytes per element and a little: gradient in, residual in
// and out. The unit is a whole tile, whose fp32 copy (16 KB) stays in L1 while it is read three
// times: twice to choose (topk_select.h), once to become the residual, in which the k chosen
// elements are then put right. Decoding writes zeros, then k numbers.
//
// Reducing is encoding of a residual to which the ranks' numbers have been added where they lie:
// what no rank kept is read once and written where it is chosen.
#include "kernels/common/tile_driver.h"
#include "kernels/topk/topk_positions.h"
#include "kernels/topk/topk_select.h"
#include "kernels/topk/topk_values.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

using topk::Chosen;
using topk::kMostKept;
using topk::Layout;

Layout layout_of(const Unit& unit, Stage stage) {
  return topk::layout_of(unit.tile.num_elements, stage, unit.batch.options->as<topk::Options>());
}
Layout layout_of(const Unit& unit) { return layout_of(unit, unit.stage); }

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

// The flags of a payload that is not k values at k positions: 0 of a tile of zeros; the others
// decode to NaN.
uint32_t special_flags(const Layout& layout, const std::byte* payload) {
  const uint32_t num_bytes = layout.values_bytes + layout.positions_bytes;
  if (all_zero(payload, num_bytes, ~uint64_t{0})) return 0;
  std::byte non_finite[2 * kMostKept + kTileElements / 8];
  write_non_finite(layout, non_finite);
  const bool valid = __builtin_memcmp(payload, non_finite, num_bytes) == 0;
  return valid ? kTileNonFinite : kTileNonFinite | kTileCorrupt;
}

// kValuesRoom values, of which k count. Returns whether they are those of a finite tile.
bool decode_values(const Layout& layout, const std::byte* payload, float* values) {
  return layout.q4_values ? topk::decode_e2m1(payload, layout.k, values)
                          : topk::decode_bf16(payload, layout.k, values);
}

void prefetch_bytes(const Ahead& ahead, const std::byte* payload, uint32_t num_bytes) {
  for (uint32_t i = 0; i < num_bytes; i += 64) ahead.prefetch_payload(payload + i);
}

// Where ranks' numbers were added to a tile, and what was there. A position may come twice.
class Additions {
 public:
  static constexpr uint32_t kMost = kTileElements / 4;

  // Adds a rank's numbers to `sums`. Returns kTile* flags, without which nothing was added.
  uint32_t collect(const Layout& layout, const std::byte* payload, float* sums) {
    alignas(64) float values[topk::kValuesRoom];
    uint16_t* positions = positions_ + count_;
    if (!decode_values(layout, payload, values) ||
        !topk::decode_indices(layout, payload + layout.values_bytes, positions)) {
      return special_flags(layout, payload);
    }
    for (uint32_t j = 0; j < layout.k; ++j) sums[positions[j]] = sums[positions[j]] + values[j];
    count_ += layout.k;
    return 0;
  }
  // v += sums * inverse; sums are +0 afterwards.
  void add(float* v, float* sums, float inverse) {
    for (uint32_t i = 0; i < count_; ++i) before_[i] = v[positions_[i]];
    for (uint32_t i = 0; i < count_; ++i) {
      v[positions_[i]] = sums[positions_[i]] * inverse + before_[i];
    }
    clear(sums);
  }
  void clear(float* sums) const {
    for (uint32_t i = 0; i < count_; ++i) sums[positions_[i]] = 0.0f;
  }
  void take_back(float* v) const {
    for (uint32_t i = 0; i < count_; ++i) v[positions_[i]] = before_[i];
  }

 private:
  uint32_t count_ = 0;
  uint16_t positions_[kMost + topk::kPositionsRoom];
  float before_[kMost];
};

// Sees whether there is a -0 among numbers.
struct MinusZeros {
  U32 seen{0u};  // all ones for a -0, less for any other number
  GRADFERRY_LANE void look_at_chunk(const float* x) {
    for (uint32_t i = 0; i < kChunk; i += kLanes) {
      seen = maximum(seen, bits(load(x + i)) ^ U32(kMagnitudeBits));
    }
  }
  GRADFERRY_LANE bool found() const { return reduce_maximum(seen) == ~0u; }
};

struct Topk {
  static constexpr uint32_t kUnit = kTileElements;
  static constexpr uint32_t kBlock = kChunk;
  static constexpr bool kPrefetches = true;

  static constexpr decltype(Codec::payload_bytes) payload_bytes = &topk::payload_bytes;

  static uint32_t encode(const Unit& unit, const float* v, std::byte* payload, float* residual) {
    const Layout layout = layout_of(unit);
    Chosen chosen;
    const auto prefetch_next = [&](uint32_t i) { unit.ahead.prefetch_32(i); };
    if (!topk::choose(v, unit.padded, layout.k, &chosen, prefetch_next)) {
      write_non_finite(layout, payload);
      return kTileNonFinite;
    }
    alignas(64) float withheld[topk::kValuesRoom];
    write_chosen(layout, &chosen, payload, withheld);
    if (residual != nullptr) {
      for (uint32_t i = 0; i < unit.padded; i += kLanes) store(residual + i, load(v + i));
      for (uint32_t j = 0; j < layout.k; ++j) residual[chosen.positions[j]] = withheld[j];
    }
    return 0;
  }

  // In place, where few numbers arrive: v is the residual, and so is what is left of it. (Where
  // many do, they had better be added by whole vectors.)
  static bool reduces(const Unit& unit, uint32_t world_size) {
    const Layout sent = layout_of(unit, Stage::kWorker);
    return !sent.bitmap && world_size <= Additions::kMost / sent.k;
  }
  static uint32_t reduce(const Unit& unit, const std::byte* const* payload_by_rank,
                         uint32_t world_size, float inverse, float* v, float* sums,
                         std::byte* payload) {
    const Layout sent = layout_of(unit, Stage::kWorker), layout = layout_of(unit, Stage::kOwner);
    Additions additions;
    uint32_t flags = 0;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      const std::byte* in = payload_by_rank[rank] + unit.tile.payload_offset;
      prefetch_bytes(unit.ahead, in, sent.values_bytes + sent.positions_bytes);
      flags |= additions.collect(sent, in, sums);
    }
    if (flags != 0) {
      additions.clear(sums);
      write_non_finite(layout, payload);
      return kTileNonFinite | (flags & kTileCorrupt);
    }
    additions.add(v, sums, inverse);

    Chosen chosen;
    MinusZeros minus_zeros;
    const auto on_the_way = [&](uint32_t i) {
      unit.ahead.prefetch_32(i);
      minus_zeros.look_at_chunk(v + i);
      if (i + kChunk < unit.padded) minus_zeros.look_at_chunk(v + i + kChunk);
    };
    if (!topk::choose(v, unit.padded, layout.k, &chosen, on_the_way)) {
      additions.take_back(v);
      write_non_finite(layout, payload);
      return kTileNonFinite;
    }
    if (minus_zeros.found()) {  // the sum of ranks that kept nothing there, +0, makes them +0
      for (uint32_t i = 0; i < unit.padded; i += kLanes) store(v + i, load(v + i) + F32(0.0f));
      for (uint32_t j = 0; j < layout.k; ++j) chosen.values[j] = chosen.values[j] + 0.0f;
    }
    alignas(64) float withheld[topk::kValuesRoom];
    write_chosen(layout, &chosen, payload, withheld);
    for (uint32_t j = 0; j < layout.k; ++j) v[chosen.positions[j]] = withheld[j];
    return 0;
  }

  template <typename Sink>
  static uint32_t decode(const Unit& unit, const std::byte* payload, Sink sink) {
    const Layout layout = layout_of(unit);
    const std::byte* positions_bytes = payload + layout.values_bytes;
    alignas(64) float values[topk::kValuesRoom];
    const bool valid = decode_values(layout, payload, values);
    if (valid && layout.bitmap) {
      uint64_t words[kTileElements / 64];
      if (topk::decode_bitmap(layout, positions_bytes, words)) {
        expand_values(words, values, unit.padded, sink);
        return 0;
      }
    } else if (valid) {
      uint16_t positions[topk::kPositionsRoom];
      if (topk::decode_indices(layout, positions_bytes, positions)) {
        give_sparsely(sink, unit.padded, [&](auto put) {
          for (uint32_t j = 0; j < layout.k; ++j) put(positions[j], values[j]);
        });
        return 0;
      }
    }
    const uint32_t flags = special_flags(layout, payload);
    fill(unit.padded, flags == 0 ? 0.0f : from_bits(kNanBits), sink);
    return flags;
  }

 private:
  static void write_chosen(const Layout& layout, Chosen* chosen, std::byte* payload,
                           float* withheld) {
    if (layout.q4_values) {
      topk::encode_e2m1(chosen->values, layout.k, payload, withheld);
    } else {
      topk::encode_bf16(chosen->values, layout.k, payload, withheld);
    }
    topk::encode_positions(layout, chosen->positions, payload + layout.values_bytes);
  }
};

}  // namespace

extern const CodecFunctions topk_functions;
const CodecFunctions topk_functions = TileDriver<Topk>::functions();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
