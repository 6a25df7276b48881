// The kernel that checks received messages, decodes their tiles into the bucket, and says what was
// wrong.
#pragma once

#include "kernels/cuda/chunk_unusual.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// What is lost where another rank's gradient was not finite, v being what this rank sent: it has no
// effect, and is put back into the residual while the bucket still holds this rank's own gradient,
// if it encoded that and not a sum. lost: bit j is element j of the lane.
template <ScalarType dtype>
GRADFERRY_DEVICE void undo_lost(const DecodeChunkCall& call, const ChunkTile& entry, float alpha,
                                const Slice& slice, uint32_t lost, float* v) {
  const Tile& tile = entry.tile;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) {
    if ((lost >> j & 1) == 0) v[j] = from_bits(kNanBits);  // which is added to nothing
  }
  const std::byte* encoded =
      entry.summed_offset == 0
          ? static_cast<const std::byte*>(call.gradient) + tile.gradient_offset * item_bytes(dtype)
          : call.sent + entry.summed_offset;
  float* residual = call.residual + tile.residual_offset;
  for_elements(slice, v, [&](uint32_t i, float x) {
    add_finite(residual + i, x - alpha * load_item<dtype>(encoded + i * item_bytes(dtype)));
  });
}

// A tile with a residual that does not arrive finite is decoded again, after what this rank sent:
// by the same code, so that nothing takes registers for it.
enum class Pass : uint32_t { kArrived, kSent, kAgain };

template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE StatusPart decode_tile(const DecodeChunkCall& call, const ChunkTile& entry,
                                        const ChunkCodec& codec) {
  static_assert(kLaneElements == 32);
  const Tile& tile = entry.tile;
  float* residual = residual_of(entry, call.residual);
  StatusPart part{0, 0};
  uint32_t lost = 0;
  for (Pass pass = Pass::kArrived;;) {
    float v[kLaneElements] = {};
    const bool is_own = pass == Pass::kSent;
    const auto unit =
        unit_of<Codec, dtype>(call.chunk, entry, codec, is_own ? Stage::kWorker : Stage::kOwner);
    const std::byte* payload =
        is_own ? call.sent + tile.output_offset : call.received.buffer + tile.payload_offset;
    const auto raw = Codec::template fetch<dtype>(unit, payload);
    if (pass == Pass::kArrived) {
      PayloadSum sum(tile.message_offset);
      Codec::template sum<dtype>(unit, raw, sum);
      part.checksum = sum.checksum;
    }
    part.flags = Codec::template decode<dtype>(unit, raw, Assign{v});
    if (is_own) {
      undo_lost<dtype>(call, entry, codec.alpha, unit.slice, lost, v);
      pass = Pass::kAgain;
      continue;
    }
    clear_beyond_end(unit.slice, v);
    if (pass == Pass::kAgain || residual == nullptr ||
        __syncthreads_and(slice_arrives_finite<dtype>(v) ? 1 : 0) != 0) {
      part.flags |= store_values<dtype>(unit.slice, tile, v, static_cast<std::byte*>(call.gradient),
                                        codec.beta, residual);
      return part;
    }
    rare_path();
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j)
      lost |= (arrives_finite<dtype>(v[j]) ? 0u : 1u) << j;
    pass = Pass::kSent;
  }
}

// fp64.
GRADFERRY_DEVICE StatusPart decode_float64(const DecodeChunkCall& call, const ChunkTile& entry,
                                           const ChunkCodec& codec) {
  const Tile& tile = entry.tile;
  const std::byte* payload = call.received.buffer + tile.payload_offset;
  PayloadSum sum(tile.message_offset);
  add_payload(sum, payload, exact_float64::payload_bytes(tile.num_elements));
  auto* own = static_cast<double*>(call.gradient);
  const double* encoded = entry.summed_offset == 0
                              ? own + tile.gradient_offset
                              : reinterpret_cast<const double*>(call.sent + entry.summed_offset);
  return {sum.checksum,
          exact_float64::decode_tile(tile, call.sent + tile.output_offset, payload, encoded, own,
                                     codec.alpha, codec.beta, residual_of(entry, call.residual))};
}

// What is left to do if a message was refused or a tile is not finite: neither happens often.
GRADFERRY_DEVICE void conclude(const DecodeChunkCall& call) {
  const ChunkBatch& chunk = call.chunk;
  const auto is_refused = [&](uint32_t i) {
    return call.received.num_messages != 0 && call.received.verdicts[chunk.tiles[i].message] != 0;
  };
  const uint32_t corrupt = first_tile(
      chunk, [&](uint32_t i) { return !is_refused(i) && (call.flags[i] & kTileCorrupt) != 0; });
  const uint32_t nonfinite = first_tile(
      chunk, [&](uint32_t i) { return is_refused(i) || (call.flags[i] & kTileNonFinite) != 0; });
  if (threadIdx.x == 0 && corrupt != kNoTile) {
    const uint32_t sender = call.received.num_messages == 0
                                ? chunk.envelope.rank
                                : call.received.messages[chunk.tiles[corrupt].message].rank;
    note(call.findings, {WireStatus::kCorruptPayload, Phase::kGather, sender, chunk.envelope.step,
                         chunk.envelope.chunk, 0, 1});
  }
  if (threadIdx.x == 0 && nonfinite != kNoTile) {
    note_nonfinite(chunk.tiles[nonfinite].tile, call.findings);
  }
  for (uint32_t i = 0; i < chunk.num_tiles; ++i) {
    if (is_refused(i)) fill_nan(call.gradient, chunk.tiles[i].tile, chunk.dtype);
  }
}

template <typename Codecs, ScalarType dtype>
__global__ void __launch_bounds__(kTileThreads, bounds_of(Codecs::kRow).decode)
    decode_chunk_kernel(DecodeChunkCall call, Share share) {
  const ChunkBatch& chunk = call.chunk;
  uint64_t* sums = sums_of(chunk);
  for_tiles<Codecs>(
      chunk, share,
      [&]<typename Codec>(uint32_t index, const ChunkTile& entry, const ChunkCodec& codec) {
        StatusPart part;
        if constexpr (dtype == ScalarType::kFloat64) {
          part = decode_float64(call, entry, codec);
        } else {
          part = decode_tile<Codec, dtype>(call, entry, codec);
        }
        if (call.received.num_messages != 0) add_sum(sums, entry.message, part.checksum);
        const uint32_t flags = block_flags(part.flags);
        if (threadIdx.x != 0) return;
        call.flags[index] = flags;
        if (flags != 0) atomicOr(&chunk.progress->flags, flags);
      });
  flush_sums(sums, call.received.num_messages);
  if (!share.concludes || !is_last_block(&chunk.progress->blocks_done)) return;

  const bool refused = check_messages(chunk, call.received, call.findings);
  const bool unusual = chunk.progress->flags != 0;
  __syncthreads();
  if (threadIdx.x == 0) chunk.progress->flags = 0;
  if (refused || unusual) conclude(call);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
