// The topk codec on CUDA.
//
// The unit is a whole tile, 32 elements in the registers of each of 128 threads (slice.h). Encoding
// with error feedback moves 12 bytes per element and a little; what it costs beside them is the
// search for the k-th largest magnitude, four instructions per element and step, one barrier per
// step (topk_block.h). Kept values and positions meet in shared memory; decoding turns positions of
// either kind into a bitmap there, whose running count says which value an element has.
#pragma once

#include "kernels/cuda/tile_kernels.h"
#include "kernels/topk/topk_payload.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk {

struct Decoded {
  float values[topk::kMostKept];
  uint32_t bitmap[topk::kWords];
  uint32_t before[topk::kWords];  // ones in the words before
};

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
    GRADFERRY_SHARED(Decoded, decoded);
    GRADFERRY_SHARED(topk::WarpTotals, totals);
    const std::byte* payload = raw.payload;
    const Slice& slice = unit.slice;
    const topk::Layout layout = topk::layout_of(slice.num_elements, unit.stage, unit.options);
    const std::byte* positions = payload + layout.values_bytes;
    __syncthreads();  // other threads may still read the last payload's data
    decoded.bitmap[threadIdx.x] = 0;

    const topk::Mark mark(layout);
    uint32_t seen = 0, seen_beside_mark = 0;
    for (uint32_t i = threadIdx.x; i < layout.values_bytes + layout.positions_bytes;
         i += kTileThreads) {
      const uint32_t byte = topk::byte_at(payload + i);
      seen |= byte;
      seen_beside_mark |= byte ^ mark.at(i);
    }
    const bool is_zero = __syncthreads_or(seen != 0 ? 1 : 0) == 0;
    const bool is_marked = __syncthreads_or(seen_beside_mark != 0 ? 1 : 0) == 0;
    if (is_zero || is_marked) return give_all(is_zero ? 0.0f : from_bits(kNanBits), sink);

    bool valid = layout.q4_values ? topk::decode_e2m1(payload, layout.k, decoded.values)
                                  : topk::decode_bf16(payload, layout.k, decoded.values);
    if (!layout.bitmap) {
      valid = topk::decode_indices(positions, layout, decoded.bitmap) && valid;
      __syncthreads();
    }
    const uint32_t word =
        layout.bitmap ? topk::bitmap_word(positions, layout) : decoded.bitmap[threadIdx.x];
    const topk::Scanned ones =
        topk::exclusive_sum(slice, totals, static_cast<uint32_t>(__popc(word)));
    decoded.before[threadIdx.x] = ones.before;
    decoded.bitmap[threadIdx.x] = word;
    const uint32_t rest = slice.num_elements - 32 * threadIdx.x;  // of elements, from the word on
    const bool is_inside =
        32 * threadIdx.x >= slice.num_elements ? word == 0 : rest >= 32 || word >> rest == 0;
    valid = valid && is_inside && ones.total == layout.k;
    if (__syncthreads_and(valid ? 1 : 0) == 0) {
      return give_all(from_bits(kNanBits), sink) | kTileCorrupt;
    }

    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t index = slice.element(row) / 32, shift = slice.element(row) % 32;
      const uint32_t bitmap = decoded.bitmap[index];
      uint32_t rank =
          decoded.before[index] + static_cast<uint32_t>(__popc(bitmap & ((1u << shift) - 1)));
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        const bool is_kept = (bitmap >> (shift + i) & 1) != 0;
        sink(kQuad * row + i, is_kept ? decoded.values[rank++] : 0.0f);
      }
    }
    return 0;
  }

 private:
  template <typename Sink>
  GRADFERRY_DEVICE static uint32_t give_all(float value, Sink sink) {
    rare_path();
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) sink(j, value);
    return is_not_finite(value) ? kTileNonFinite : 0;
  }
};

using TileCodec = Topk;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk
