// The kernel that checks received messages, reduces their tiles and seals the result.
#pragma once

#include "kernels/cuda/chunk_received.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

template <typename Codec, bool kIsFloat64>
GRADFERRY_DEVICE StatusPart reduce_entry(const ReduceChunkCall& call, const ChunkTile& entry,
                                         const ChunkCodec& codec) {
  const ChunkBatch& chunk = call.chunk;
  const Tile& tile = entry.tile;
  const Inbox inbox{call.received, sums_of(chunk)};
  const uint32_t world_size = call.received.num_messages;
  float* residual = residual_of(entry, call.residual);
  std::byte* out = call.out + kHeaderBytes;
  StatusPart part{0, 0};
  if constexpr (kIsFloat64) {
    const bool is_zero = sum_float64(tile, inbox);
    const bool is_held = chunk.hold_zero_tiles && __syncthreads_or(is_zero ? 0 : 1) == 0;
    part.checksum =
        exact_float64::reduce_tile(tile, is_held, inbox, world_size, call.gain, residual, out);
  } else {
    with_payload_dtype<Codec>(chunk.dtype, [&]<ScalarType dtype>() {
      part = reduce_tile<Codec, dtype>(
          [&](Stage stage) { return unit_of<Codec, dtype>(chunk, entry, codec, stage); }, tile,
          chunk.hold_zero_tiles, inbox, world_size, call.gain, residual, out);
    });
  }
  return part;
}

// A rank that owns no tile of the chunk has one block without a tile.
template <typename Codecs, bool kIsFloat64>
__global__ void __launch_bounds__(kTileThreads, bounds_of(Codecs::kRow).reduce)
    reduce_chunk_kernel(ReduceChunkCall call, Share share) {
  const ChunkBatch& chunk = call.chunk;
  uint64_t* sums = sums_of(chunk);
  const uint32_t sent = call.received.num_messages;  // behind those received
  for_tiles<Codecs>(chunk, share,
                    [&]<typename Codec>(uint32_t, const ChunkTile& entry, const ChunkCodec& codec) {
                      const StatusPart part = reduce_entry<Codec, kIsFloat64>(call, entry, codec);
                      add_sum(sums, sent, part.checksum);
                      const bool is_corrupt = (block_flags(part.flags) & kTileCorrupt) != 0;
                      if (is_corrupt && threadIdx.x == 0)
                        atomicAdd(&chunk.progress->corrupt_tiles, 1);
                    });
  flush_sums(sums, sent + 1);
  if (!share.concludes || !is_last_block(&chunk.progress->blocks_done)) return;

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
  write_header(call.out, make_header(envelope, call.payload_bytes, sums[sent], status));
  sums[sent] = 0;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
