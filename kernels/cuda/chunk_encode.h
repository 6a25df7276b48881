// The kernel that encodes a chunk and seals its messages.
#pragma once

#include "kernels/cuda/chunk_parts.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Returns the thread's part of the payload's checksum.
template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE uint64_t encode_entry(const EncodeChunkCall& call, const ChunkTile& entry,
                                       const ChunkCodec& codec) {
  const ChunkBatch& chunk = call.chunk;
  float* residual = residual_of(entry, call.residual);
  if constexpr (dtype == ScalarType::kFloat64) {
    return exact_float64::encode_tile(entry.tile, chunk.hold_zero_tiles,
                                      static_cast<const double*>(call.gradient), codec.alpha,
                                      call.gain, residual, call.out);
  } else {
    return encode_tile<Codec, dtype>(unit_of<Codec, dtype>(chunk, entry, codec, Stage::kWorker),
                                     entry.tile, chunk.hold_zero_tiles,
                                     static_cast<const std::byte*>(call.gradient), codec.alpha,
                                     call.gain, residual, call.out);
  }
}

template <typename Codecs, ScalarType dtype>
__global__ void __launch_bounds__(kTileThreads, bounds_of(Codecs::kRow).encode)
    encode_chunk_kernel(EncodeChunkCall call, Share share) {
  const ChunkBatch& chunk = call.chunk;
  uint64_t* sums = sums_of(chunk);
  for_tiles<Codecs>(chunk, share,
                    [&]<typename Codec>(uint32_t, const ChunkTile& entry, const ChunkCodec& codec) {
                      const uint64_t checksum = encode_entry<Codec, dtype>(call, entry, codec);
                      if (call.num_messages != 0) add_sum(sums, entry.message, checksum);
                    });
  if (call.num_messages == 0) return;
  flush_sums(sums, call.num_messages);
  if (!share.concludes || !is_last_block(&chunk.progress->blocks_done)) return;

  for (uint32_t m = threadIdx.x; m < call.num_messages; m += kTileThreads) {
    const Message message = call.messages[m];
    write_header(call.out + message.offset,
                 make_header(chunk.envelope, message.payload_bytes, sums[m]));
    sums[m] = 0;
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
