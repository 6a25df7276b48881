// The kernel that checks received messages, reduces their tiles and seals the result.
#pragma once

#include "kernels/cuda/chunk_received.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Whether the tile is a held zero tile.
GRADFERRY_DEVICE bool sum_and_compare(const Tile& tile, const Received& received,
                                      uint32_t num_bytes, uint64_t* sums, bool hold_zero_tiles) {
  const bool is_zero = sum_payloads(received, tile.payload_offset, num_bytes, sums);
  return hold_zero_tiles && __syncthreads_or(is_zero ? 0 : 1) == 0;
}

template <typename Codec>
GRADFERRY_APART StatusPart reduce_entry(const ChunkTile& entry, const ChunkCodec& codec,
                                        uint64_t seed, uint64_t step, bool hold_zero_tiles,
                                        ScalarType payload_dtype, const Message* messages,
                                        uint32_t num_messages, const std::byte* buffer,
                                        uint64_t* sums, const float* gain, float* residual,
                                        std::byte* out) {
  const Received received{messages, num_messages, buffer};
  StatusPart part{0, 0};
  with_payload_dtype<Codec>(payload_dtype, [&]<ScalarType dtype>() {
    const auto unit = unit_of<Codec, dtype>(entry, codec, seed, step, Stage::kWorker);
    const auto owner_unit = unit_of<Codec, dtype>(entry, codec, seed, step, Stage::kOwner);
    const bool is_zero =
        sum_and_compare(entry.tile, received, unit.payload_bytes, sums, hold_zero_tiles);
    part = reduce_tile<Codec, dtype>(
        unit, owner_unit, entry.tile, is_zero,
        [&](uint32_t rank) { return payloads_of(received, rank); }, num_messages, gain,
        residual_of(entry, residual), out);
  });
  return part;
}

template <typename Codecs, bool kIsFloat64>
GRADFERRY_DEVICE StatusPart reduce_block(const ReduceChunkCall& call, const TileJob& job) {
  const ChunkBatch& chunk = call.chunk;
  const Received received{call.received.messages, call.received.num_messages, call.received.buffer};
  std::byte* out = call.out + kHeaderBytes;
  StatusPart part{0, 0};
  if constexpr (kIsFloat64) {
    const Tile tile = job.entry.tile;
    const bool is_zero =
        sum_and_compare(tile, received, exact_float64::payload_bytes(tile.num_elements),
                        sums_of(chunk), chunk.hold_zero_tiles);
    part.checksum = exact_float64::reduce_tile(
        tile, is_zero, [&](uint32_t rank) { return payloads_of(received, rank); },
        received.num_messages, call.gain, residual_of(job.entry, call.residual), out);
  } else {
    Codecs::with(job.codec.row, [&]<typename Codec>() {
      part = reduce_entry<Codec>(job.entry, job.codec, job.seed, job.step, chunk.hold_zero_tiles,
                                 chunk.dtype, received.messages, received.num_messages,
                                 received.buffer, sums_of(chunk), call.gain, call.residual, out);
    });
  }
  return part;
}

// A rank that owns no tile of the chunk has one block without a tile.
template <typename Codecs, bool kIsFloat64>
__global__ void __launch_bounds__(kTileThreads, Codecs::kMinBlocks)
    reduce_chunk_kernel(ReduceChunkCall call) {
  GRADFERRY_SHARED(StatusStorage<kTileThreads>, storage);
  const ChunkBatch& chunk = call.chunk;
  uint64_t* sum_sent = sums_of(chunk) + call.received.num_messages;
  if (blockIdx.x < chunk.num_tiles) {
    const StatusPart part = reduce_block<Codecs, kIsFloat64>(call, job_of(chunk));
    const StatusPart all = combine_status<kTileThreads>(storage, part);
    if (threadIdx.x == 0) {
      add_to(sum_sent, all.checksum);
      if ((all.flags & kTileCorrupt) != 0) atomicAdd(&chunk.progress->corrupt_tiles, 1);
    }
  }
  if (!is_last_block(&chunk.progress->blocks_done)) return;

  if (call.forward != nullptr) judge_messages(chunk, call.from_siblings, nullptr, call.findings);
  check_messages(chunk, call.received, call.findings);
  if (threadIdx.x != 0) return;
  const Envelope envelope = envelope_of(chunk, Phase::kGather);
  if (const uint32_t corrupt = chunk.progress->corrupt_tiles; corrupt != 0) {
    note(call.findings, {WireStatus::kCorruptPayload, Phase::kScatter, envelope.rank, envelope.step,
                         envelope.chunk, 0, corrupt});
    chunk.progress->corrupt_tiles = 0;
  }
  const uint32_t status = call.findings->status;
  if (call.forward != nullptr) {
    write_header(call.forward, make_header(envelope_of(chunk, Phase::kForward),
                                           call.forward_payload_bytes, 0, status));
  }
  if (call.out == nullptr) return;
  write_header(call.out, make_header(envelope, call.payload_bytes, *sum_sent, status));
  *sum_sent = 0;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
