// The kernel that checks received messages, decodes their tiles into the bucket, and says what was
// wrong.
#pragma once

#include "kernels/cuda/chunk_unusual.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// What becomes of a tile that is not finite, in two steps, before which everything is decoded anew
// and one element at a time: so that nothing takes registers for this.
//
// Where another rank's gradient was not finite, what this rank sent has no effect: it is put back
// into the residual while the bucket still holds this rank's own gradient, if it encoded that and
// not a sum. Returns which of the lane's elements these are: bit j is element j.
template <typename Codec, ScalarType dtype>
GRADFERRY_APART uint32_t undo_lost(const ChunkTile& entry, const ChunkCodec& codec, uint64_t seed,
                                   uint64_t step, const std::byte* in, const std::byte* sent,
                                   const std::byte* gradient, float* residual) {
  const Tile& tile = entry.tile;
  const auto options = options_of<typename Codec::Options>(codec);
  const auto unit = make_unit<Codec, dtype>(tile, Stage::kOwner, seed, step, options);
  const auto own_unit = make_unit<Codec, dtype>(tile, Stage::kWorker, seed, step, options);
  static_assert(kLaneElements == 32);
  uint32_t lost = 0;
  Codec::template decode<dtype>(unit, in + tile.payload_offset, [&](uint32_t j, float x) {
    lost |= (arrives_finite<dtype>(x) ? 0u : 1u) << j;
  });
  gradient += tile.gradient_offset * item_bytes(dtype);
  residual += tile.residual_offset;
  const std::byte* encoded = entry.summed_offset == 0 ? gradient : sent + entry.summed_offset;
  Codec::template decode<dtype>(own_unit, sent + tile.output_offset, [&](uint32_t j, float x) {
    const uint32_t element = unit.slice.element(j / kQuad) + j % kQuad;
    if ((lost >> j & 1) == 0 || element >= unit.slice.num_elements) return;
    const float own = load_item<dtype>(encoded + element * item_bytes(dtype));
    add_finite(residual + element, x - codec.alpha * own);
  });
  return lost;
}

// Writes the tile. Returns flags.
template <typename Codec, ScalarType dtype>
GRADFERRY_APART uint32_t store_rest(const ChunkTile& entry, const ChunkCodec& codec, uint64_t seed,
                                    uint64_t step, const std::byte* in, uint32_t lost,
                                    std::byte* gradient, float* residual) {
  const Tile& tile = entry.tile;
  const auto options = options_of<typename Codec::Options>(codec);
  const auto unit = make_unit<Codec, dtype>(tile, Stage::kOwner, seed, step, options);
  const float beta = codec.beta;
  gradient += tile.gradient_offset * item_bytes(dtype);
  residual += tile.residual_offset;
  uint32_t seen = 0;
  const uint32_t flags =
      Codec::template decode<dtype>(unit, in + tile.payload_offset, [&](uint32_t j, float x) {
        const uint32_t element = unit.slice.element(j / kQuad) + j % kQuad;
        if (element >= unit.slice.num_elements) return;
        store_item<dtype>(gradient + element * item_bytes(dtype), narrow<dtype>(x));
        seen |= lost & (1u << j);
        if (beta != 0.0f && (lost >> j & 1) == 0) add_finite(residual + element, beta * x);
      });
  return seen != 0 ? flags | kTileNonFinite : flags;
}

// Adds the tile's payload to a checksum, which brings closer what is then read again.
GRADFERRY_DEVICE uint64_t sum_payload(const Tile& tile, const std::byte* in, uint32_t num_bytes) {
  return sum_words(in + tile.payload_offset, num_bytes, tile.message_offset, 16 * threadIdx.x,
                   16 * kTileThreads)
      .sum;
}

template <typename Codec, ScalarType dtype>
GRADFERRY_APART StatusPart decode_entry(const ChunkTile& entry, const ChunkCodec& codec,
                                        uint64_t seed, uint64_t step, const std::byte* in,
                                        const std::byte* sent, std::byte* gradient,
                                        float* all_residuals) {
  const Tile& tile = entry.tile;
  const auto unit = unit_of<Codec, dtype>(entry, codec, seed, step, Stage::kOwner);
  float* residual = residual_of(entry, all_residuals);
  StatusPart part{0, 0};
  part.checksum = sum_payload(tile, in, unit.payload_bytes);
  float v[kLaneElements];
  part.flags = decode_values<Codec, dtype>(unit, in + tile.payload_offset, v);
  if (residual != nullptr) {
    if (__syncthreads_and(slice_arrives_finite<dtype>(v) ? 1 : 0) == 0) {
      rare_path();
      const uint32_t lost =
          undo_lost<Codec, dtype>(entry, codec, seed, step, in, sent, gradient, residual);
      part.flags = store_rest<Codec, dtype>(entry, codec, seed, step, in, lost, gradient, residual);
      return part;
    }
  }
  part.flags |= store_values<dtype>(unit.slice, tile, v, gradient, codec.beta, residual);
  return part;
}

// What is left to do if a message was refused or a tile is not finite: neither happens often.
GRADFERRY_DEVICE void conclude(const DecodeChunkCall& call) {
  GRADFERRY_SHARED(Minima, corrupt_minima);
  GRADFERRY_SHARED(Minima, nonfinite_minima);
  const ChunkBatch& chunk = call.chunk;
  const auto is_refused = [&](uint32_t i) {
    return call.received.num_messages != 0 && call.received.verdicts[chunk.tiles[i].message] != 0;
  };
  const uint32_t corrupt = first_tile(corrupt_minima, chunk, [&](uint32_t i) {
    return !is_refused(i) && (call.flags[i] & kTileCorrupt) != 0;
  });
  const uint32_t nonfinite = first_tile(nonfinite_minima, chunk, [&](uint32_t i) {
    return is_refused(i) || (call.flags[i] & kTileNonFinite) != 0;
  });
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
__global__ void __launch_bounds__(kTileThreads, Codecs::kMinBlocks)
    decode_chunk_kernel(DecodeChunkCall call) {
  GRADFERRY_SHARED(StatusStorage<kTileThreads>, storage);
  const ChunkBatch& chunk = call.chunk;
  const TileJob job = job_of(chunk);
  const std::byte* in = call.received.buffer;
  auto* gradient = static_cast<std::byte*>(call.gradient);
  StatusPart part{0, 0};
  if constexpr (dtype == ScalarType::kFloat64) {
    const Tile tile = job.entry.tile;
    part.checksum = sum_payload(tile, in, exact_float64::payload_bytes(tile.num_elements));
    auto* own = static_cast<double*>(call.gradient);
    const double* encoded =
        job.entry.summed_offset == 0
            ? own + tile.gradient_offset
            : reinterpret_cast<const double*>(call.sent + job.entry.summed_offset);
    part.flags = exact_float64::decode_tile(tile, call.sent + tile.output_offset,
                                            in + tile.payload_offset, encoded, own, job.codec.alpha,
                                            job.codec.beta, residual_of(job.entry, call.residual));
  } else {
    Codecs::with(job.codec.row, [&]<typename Codec>() {
      part = decode_entry<Codec, dtype>(job.entry, job.codec, job.seed, job.step, in, call.sent,
                                        gradient, call.residual);
    });
  }
  const StatusPart all = combine_status<kTileThreads>(storage, part);
  if (threadIdx.x == 0) {
    call.flags[blockIdx.x] = all.flags;
    if (all.flags != 0) atomicOr(&chunk.progress->flags, all.flags);
    if (call.received.num_messages != 0) add_to(sums_of(chunk) + job.entry.message, all.checksum);
  }
  if (!is_last_block(&chunk.progress->blocks_done)) return;

  const bool refused = check_messages(chunk, call.received, call.findings);
  const bool unusual = chunk.progress->flags != 0;
  __syncthreads();
  if (threadIdx.x == 0) chunk.progress->flags = 0;
  if (refused || unusual) conclude(call);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
