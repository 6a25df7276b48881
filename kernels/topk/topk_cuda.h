// The topk codec on CUDA.
//
// The unit is a whole tile, 32 elements in the registers of each of 128 threads (slice.h). Encoding
// with error feedback moves 12 bytes per element and a little; what it costs beside them is the
// search for the k-th largest magnitude, four instructions per element and step, one barrier per
// step (topk_block.h). Kept values and positions meet in shared memory. There payloads are added
// up, too: an addition per kept value, since decoded zeros are +0 and no sum is -0, so that those
// of other elements would change nothing.
#pragma once

#include "kernels/cuda/tile_kernels.h"
#include "kernels/topk/topk_payload.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk {

struct Topk {
  using Options = topk::Options;
  static constexpr CodecRow kRow = CodecRow::topk;
  static constexpr bool kByBlocks = false;
  static constexpr bool kUnitsAreQuads = false;
  static constexpr bool kUsesDtype = false;
  struct Bytes {  // any thread reads any of them
    const std::byte* payload;
  };
  template <ScalarType>
  using Raw = Bytes;

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType, Stage stage,
                                                 const Options& options) {
    return topk::payload_bytes(n, stage, options);
  }

  template <ScalarType, bool>
  GRADFERRY_DEVICE static void encode(const TileUnit<Options>& unit, float* v, PayloadWriter& out) {
    GRADFERRY_SHARED(topk::Kept, kept);
    GRADFERRY_SHARED(topk::WarpTotals, totals);
    const Slice& slice = unit.slice;
    const topk::Layout layout = topk::layout_of(slice.num_elements, unit.stage, unit.options);
    const uint32_t sections = layout.values_bytes + layout.positions_bytes;
    out.zeros(sections, unit.payload_bytes);

    uint32_t largest = 0;
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) largest = maximum(largest, magnitude_bits(v[j]));
    if (__syncthreads_or(largest >= kInfinityBits ? 1 : 0) != 0) {
      rare_path();
      const topk::Mark mark(layout);
      for (uint32_t i = threadIdx.x; i < sections; i += kTileThreads) out.byte(i, mark.at(i));
      GRADFERRY_UNROLL
      for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = from_bits(kNanBits);
      return;
    }

    const topk::Cut cut = topk::find_cut(slice, totals, v, layout.k, largest);
    const topk::Ranks ranks = topk::rank_elements(slice, totals, v, cut);
    topk::for_kept(ranks, [&](uint32_t j, uint32_t rank) {
      kept.positions[rank] = static_cast<uint16_t>(slice.element(j / kQuad) + j % kQuad);
      if (layout.q4_values) {
        kept.values[rank] = v[j];
      } else {
        const uint32_t value = topk::encode_value(v[j]);
        out.halfword(2 * rank, value);
        v[j] = v[j] - bf16_to_float(value);
      }
    });
    if (layout.bitmap) topk::encode_bitmap(slice, ranks, layout, out);
    __syncthreads();
    if (!layout.bitmap) topk::encode_indices(kept, layout, out);
    if (layout.q4_values) {
      topk::encode_e2m1(slice, kept, layout.k, out);
      __syncthreads();
      topk::for_kept(ranks, [&](uint32_t j, uint32_t rank) { v[j] = kept.values[rank]; });
    }
  }

  template <ScalarType>
  GRADFERRY_DEVICE static Bytes fetch(const TileUnit<Options>&, const std::byte* payload) {
    return {payload};
  }
  template <ScalarType>
  GRADFERRY_DEVICE static void sum(const TileUnit<Options>& unit, const Bytes& raw,
                                   PayloadSum& sum) {
    add_payload(sum, raw.payload, unit.payload_bytes);
  }

  template <ScalarType, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const Bytes& raw,
                                          Sink sink) {
    set_sums(unit.slice, 0.0f);
    const uint32_t flags = add(unit, raw);
    float v[kLaneElements];
    take_sums(unit.slice, v);
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) sink(j, v[j]);
    return flags;
  }

  GRADFERRY_DEVICE static void set_sums(const Slice& slice, float x) {
    float v[kLaneElements];
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = x;
    store_quads<ScalarType::kFloat32>(slice, reinterpret_cast<std::byte*>(scratch()), v);
  }
  GRADFERRY_DEVICE static uint32_t add(const TileUnit<Options>& unit, const Bytes& raw) {
    GRADFERRY_SHARED(float, values[topk::kMostKept]);
    GRADFERRY_SHARED(topk::WarpTotals, totals);
    const Slice& slice = unit.slice;
    const topk::Layout layout = topk::layout_of(slice.num_elements, unit.stage, unit.options);
    const std::byte* positions = raw.payload + layout.values_bytes;
    // With a bitmap other threads read a value than wrote it: perhaps still of the last payload.
    if (layout.bitmap) __syncthreads();
    bool valid = layout.q4_values ? topk::decode_e2m1(raw.payload, layout.k, values)
                                  : topk::decode_bf16(raw.payload, layout.k, values);
    uint32_t word = 0, rank = 0;
    if (layout.bitmap) {
      word = topk::bitmap_word(positions, layout);
      const topk::Scanned ones =
          topk::exclusive_sum(slice, totals, static_cast<uint32_t>(__popc(word)));
      rank = ones.before;
      valid = valid && ones.total == layout.k && topk::is_inside(word, slice.num_elements);
    } else {
      valid = topk::are_indices(positions, layout) && valid;
    }
    // One that is marked is not valid; of zeros only with a single index, whose value is +0.
    if (__syncthreads_and(valid ? 1 : 0) == 0) return add_other(slice, layout, raw.payload);
    // No two threads have the same element.
    for (; word != 0; word &= word - 1) {
      scratch()[32 * threadIdx.x + static_cast<uint32_t>(__ffs(word)) - 1] += values[rank++];
    }
    for (uint32_t j = threadIdx.x; !layout.bitmap && j < layout.k; j += kTileThreads) {
      scratch()[topk::index_at(positions, j)] += values[j];
    }
    return 0;
  }
  GRADFERRY_DEVICE static void take_sums(const Slice& slice, float* v) {
    __syncthreads();
    load_quads<ScalarType::kFloat32>(slice, reinterpret_cast<const std::byte*>(scratch()), v);
  }

 private:
  // A payload of zeros, that of a tile that is not finite, or a corrupt one.
  GRADFERRY_DEVICE static uint32_t add_other(const Slice& slice, const topk::Layout& layout,
                                             const std::byte* payload) {
    rare_path();
    const topk::Mark mark(layout);
    uint32_t seen = 0, seen_beside_mark = 0;
    for (uint32_t i = threadIdx.x; i < layout.values_bytes + layout.positions_bytes;
         i += kTileThreads) {
      const uint32_t byte = topk::byte_at(payload + i);
      seen |= byte;
      seen_beside_mark |= byte ^ mark.at(i);
    }
    if (__syncthreads_or(seen != 0 ? 1 : 0) == 0) return 0;
    const bool is_marked = __syncthreads_or(seen_beside_mark != 0 ? 1 : 0) == 0;
    set_sums(slice, from_bits(kNanBits));
    return kTileNonFinite | (is_marked ? 0 : kTileCorrupt);
  }
};

using TileCodec = Topk;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk
