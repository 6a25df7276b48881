// The kernel that encodes a chunk and seals its messages.
#pragma once

#include "kernels/cuda/chunk_parts.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

template <typename Codec, ScalarType dtype>
GRADFERRY_APART uint64_t encode_entry(const ChunkTile& entry, const ChunkCodec& codec,
                                      uint64_t seed, uint64_t step, bool hold_zero_tiles,
                                      const std::byte* gradient, const float* gain, float* residual,
                                      std::byte* out) {
  return encode_tile<Codec, dtype>(unit_of<Codec, dtype>(entry, codec, seed, step, Stage::kWorker),
                                   entry.tile, hold_zero_tiles, gradient, codec.alpha, gain,
                                   residual_of(entry, residual), out);
}

template <typename Codecs, ScalarType dtype>
__global__ void __launch_bounds__(kTileThreads, Codecs::kMinBlocks)
    encode_chunk_kernel(EncodeChunkCall call) {
  GRADFERRY_SHARED(StatusStorage<kTileThreads>, storage);
  const ChunkBatch& chunk = call.chunk;
  const TileJob job = job_of(chunk);
  const auto* gradient = static_cast<const std::byte*>(call.gradient);
  uint64_t checksum = 0;  // the thread's part
  if constexpr (dtype == ScalarType::kFloat64) {
    checksum = exact_float64::encode_tile(
        job.entry.tile, chunk.hold_zero_tiles, static_cast<const double*>(call.gradient),
        job.codec.alpha, call.gain, residual_of(job.entry, call.residual), call.out);
  } else {
    Codecs::with(job.codec.row, [&]<typename Codec>() {
      checksum = encode_entry<Codec, dtype>(job.entry, job.codec, job.seed, job.step,
                                            chunk.hold_zero_tiles, gradient, call.gain,
                                            call.residual, call.out);
    });
  }
  if (call.num_messages == 0) return;
  const StatusPart all = combine_status<kTileThreads>(storage, {checksum, 0});
  uint64_t* sums = sums_of(chunk);
  if (threadIdx.x == 0) add_to(sums + job.entry.message, all.checksum);
  if (!is_last_block(&chunk.progress->blocks_done)) return;

  for (uint32_t m = threadIdx.x; m < call.num_messages; m += kTileThreads) {
    const Message message = call.messages[m];
    write_header(call.out + message.offset,
                 make_header(chunk.envelope, message.payload_bytes, sums[m]));
    sums[m] = 0;
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
