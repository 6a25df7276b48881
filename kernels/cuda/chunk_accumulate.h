// The kernel that checks received messages and puts the means of their tiles into the bucket.
//
// What limits it is memory: a payload per rank and element is read, and the mean is written. Its
// dtype is no parameter of the kernel, since only the last few instructions depend on it.
#pragma once

#include "kernels/cuda/chunk_received.h"
#include "kernels/cuda/chunk_unusual.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Returns flags.
GRADFERRY_DEVICE uint32_t store_means(const Slice& slice, const Tile& tile, const float* v,
                                      ScalarType dtype, std::byte* gradient) {
  gradient += tile.gradient_offset * item_bytes(dtype);
  bool all_finite = true;
  switch (dtype) {
    case ScalarType::kBFloat16:
      all_finite = store_slice<ScalarType::kBFloat16>(slice, gradient, v);
      break;
    case ScalarType::kFloat16:
      all_finite = store_slice<ScalarType::kFloat16>(slice, gradient, v);
      break;
    default: all_finite = store_slice<ScalarType::kFloat32>(slice, gradient, v);
  }
  return all_finite ? 0 : kTileNonFinite;
}

// Returns flags.
template <typename Codec, bool kIsFloat64>
GRADFERRY_DEVICE uint32_t accumulate_entry(const AccumulateChunkCall& call, const ChunkTile& entry,
                                           const ChunkCodec& codec) {
  const ChunkBatch& chunk = call.chunk;
  const Tile& tile = entry.tile;
  const Inbox inbox{call.received, sums_of(chunk)};
  const uint32_t world_size = call.received.num_messages;
  uint32_t flags = 0;
  if constexpr (kIsFloat64) {
    sum_float64(tile, inbox);
    flags = exact_float64::accumulate_tile(tile, inbox, world_size,
                                           static_cast<double*>(call.gradient));
  } else {
    float v[kLaneElements];
    with_payload_dtype<Codec>(chunk.dtype, [&]<ScalarType dtype>() {
      const auto unit = unit_of<Codec, dtype>(chunk, entry, codec, Stage::kWorker);
      flags = sum_ranks<Codec, dtype>(unit, tile, inbox, world_size, v).flags;
    });
    const Slice slice(tile.num_elements, Codec::kByBlocks);
    const float inverse = 1.0f / static_cast<float>(world_size);
    GRADFERRY_UNROLL
    for (float& x : v) x = canonical(x * inverse);
    clear_beyond_end(slice, v);
    flags |= store_means(slice, tile, v, chunk.dtype, static_cast<std::byte*>(call.gradient));
  }
  return flags;
}

// What is left to do if a message was refused or a tile is not finite: neither happens often.
// Every tile holds a part of every message.
GRADFERRY_DEVICE void conclude(const AccumulateChunkCall& call, bool refused) {
  const ChunkBatch& chunk = call.chunk;
  const Envelope& own = chunk.envelope;
  const uint32_t nonfinite = first_tile(
      chunk, [&](uint32_t i) { return refused || (call.flags[i] & kTileNonFinite) != 0; });
  if (threadIdx.x == 0) {
    if (const uint32_t corrupt = chunk.progress->corrupt_tiles; corrupt != 0) {
      note(call.findings, {WireStatus::kCorruptPayload, Phase::kScatter, own.rank, own.step,
                           own.chunk, 0, corrupt});
      chunk.progress->corrupt_tiles = 0;
    }
    if (nonfinite != kNoTile) {
      const Tile& tile = chunk.tiles[nonfinite].tile;
      note_nonfinite(tile, call.findings);
      if (call.nonfinite_is_fault) {
        note(call.findings, {WireStatus::kNonFiniteMean, Phase::kScatter, own.rank, own.step,
                             own.chunk, 0, tile.id});
      }
    }
  }
  for (uint32_t i = 0; refused && i < chunk.num_tiles; ++i) {
    fill_nan(call.gradient, chunk.tiles[i].tile, chunk.dtype);
  }
}

// A rank that owns no tile of the chunk has one block without a tile.
template <typename Codecs, bool kIsFloat64>
__global__ void __launch_bounds__(kTileThreads, bounds_of(Codecs::kRow).accumulate)
    accumulate_chunk_kernel(AccumulateChunkCall call, Share share) {
  const ChunkBatch& chunk = call.chunk;
  for_tiles<Codecs>(
      chunk, share,
      [&]<typename Codec>(uint32_t index, const ChunkTile& entry, const ChunkCodec& codec) {
        const uint32_t flags = block_flags(accumulate_entry<Codec, kIsFloat64>(call, entry, codec));
        if (threadIdx.x != 0) return;
        call.flags[index] = flags;
        if (flags != 0) atomicOr(&chunk.progress->flags, flags);
        if ((flags & kTileCorrupt) != 0) atomicAdd(&chunk.progress->corrupt_tiles, 1);
      });
  flush_sums(sums_of(chunk), call.received.num_messages);
  if (!share.concludes || !is_last_block(&chunk.progress->blocks_done)) return;

  const bool refused = check_messages(chunk, call.received, call.findings);
  const bool unusual = chunk.progress->flags != 0;
  __syncthreads();
  if (threadIdx.x == 0) chunk.progress->flags = 0;
  if (refused || unusual) conclude(call, refused);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
