// The kernel that checks received messages and puts the means of their tiles into the bucket.
//
// What limits it is memory: a payload per rank and element is read twice, the second time from a
// cache, and the mean is written once. Its dtype is no parameter of the kernel, since only the last
// few instructions depend on it.
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

template <typename Codec>
GRADFERRY_APART uint32_t accumulate_entry(const ChunkTile& entry, const ChunkCodec& codec,
                                          uint64_t seed, uint64_t step, ScalarType dtype,
                                          const Message* messages, uint32_t num_messages,
                                          const std::byte* buffer, uint64_t* sums,
                                          std::byte* gradient) {
  const Received received{messages, num_messages, buffer};
  const Tile& tile = entry.tile;
  float v[kLaneElements];
  uint32_t flags = 0;
  with_payload_dtype<Codec>(dtype, [&]<ScalarType payload_dtype>() {
    const auto unit = unit_of<Codec, payload_dtype>(entry, codec, seed, step, Stage::kWorker);
    sum_payloads(received, tile.payload_offset, unit.payload_bytes, sums);
    flags = average_ranks<Codec, payload_dtype>(
        unit, tile, [&](uint32_t rank) { return payloads_of(received, rank); }, num_messages, v);
  });
  return flags | store_means(Slice(tile.num_elements), tile, v, dtype, gradient);
}

template <typename Codecs, bool kIsFloat64>
GRADFERRY_DEVICE uint32_t accumulate_block(const AccumulateChunkCall& call, const TileJob& job) {
  const ChunkBatch& chunk = call.chunk;
  const Received received{call.received.messages, call.received.num_messages, call.received.buffer};
  uint32_t flags = 0;
  if constexpr (kIsFloat64) {
    const Tile tile = job.entry.tile;
    sum_payloads(received, tile.payload_offset, exact_float64::payload_bytes(tile.num_elements),
                 sums_of(chunk));
    flags = exact_float64::accumulate_tile(
        tile, [&](uint32_t rank) { return payloads_of(received, rank); }, received.num_messages,
        static_cast<double*>(call.gradient));
  } else {
    Codecs::with(job.codec.row, [&]<typename Codec>() {
      flags = accumulate_entry<Codec>(job.entry, job.codec, job.seed, job.step, chunk.dtype,
                                      received.messages, received.num_messages, received.buffer,
                                      sums_of(chunk), static_cast<std::byte*>(call.gradient));
    });
  }
  return flags;
}

// What is left to do if a message was refused or a tile is not finite: neither happens often.
// Every tile holds a part of every message.
GRADFERRY_DEVICE void conclude(const AccumulateChunkCall& call, bool refused) {
  GRADFERRY_SHARED(Minima, nonfinite_minima);
  const ChunkBatch& chunk = call.chunk;
  const Envelope& own = chunk.envelope;
  const uint32_t nonfinite = first_tile(nonfinite_minima, chunk, [&](uint32_t i) {
    return refused || (call.flags[i] & kTileNonFinite) != 0;
  });
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
__global__ void __launch_bounds__(kTileThreads, Codecs::kMinBlocks)
    accumulate_chunk_kernel(AccumulateChunkCall call) {
  GRADFERRY_SHARED(StatusStorage<kTileThreads>, storage);
  const ChunkBatch& chunk = call.chunk;
  if (blockIdx.x < chunk.num_tiles) {
    const uint32_t flags = accumulate_block<Codecs, kIsFloat64>(call, job_of(chunk));
    const StatusPart all = combine_status<kTileThreads>(storage, {0, flags});
    if (threadIdx.x == 0) {
      call.flags[blockIdx.x] = all.flags;
      if (all.flags != 0) atomicOr(&chunk.progress->flags, all.flags);
      if ((all.flags & kTileCorrupt) != 0) atomicAdd(&chunk.progress->corrupt_tiles, 1);
    }
  }
  if (!is_last_block(&chunk.progress->blocks_done)) return;

  const bool refused = check_messages(chunk, call.received, call.findings);
  const bool unusual = chunk.progress->flags != 0;
  __syncthreads();
  if (threadIdx.x == 0) chunk.progress->flags = 0;
  if (refused || unusual) conclude(call, refused);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
