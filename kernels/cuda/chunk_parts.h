// The kernels of a chunk: a block of 128 threads per tile (kernels/cuda/tile_kernels.h), with
// whatever codec the tile's entry names, and the messages' headers by the last block that is done.
//
// A kernel is instantiated for a set of codecs (chunk_launch.h). All threads of a block have the
// same tile, so that the choice of its codec is no divergence; what it costs is registers, since a
// kernel takes those of its greediest codec. What a codec does with a tile is a function that the
// kernel calls: inlined beside others it would lose its arrays to local memory. A set gives
//
//   kMinBlocks   for __launch_bounds__
//   kHasFloat64  there are kernels for fp64 gradients, which only `exact` has
//   with(row, f) calls f.operator()<Codec>() for the codec of a row of the table
//
// Checksums of messages are sums, to which every block adds its tile's by one atomic operation per
// message. So the last block has little to do where nothing is wrong: a header per message.
#pragma once

#include <type_traits>

#include "kernels/codec_rows.h"
#include "kernels/cuda/message_headers.h"
#include "kernels/cuda/tile_kernels.h"
#include "kernels/exact/exact_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// --- device helpers ------------------------------------------------------------------------------

// Whether all other blocks of the launch are done. Then everything that they wrote is visible to
// all threads of this one: each block's threads write, meet at the barrier, and thread 0 counts the
// block behind a fence, which covers what it knows of the others; the thread that finds the count
// complete passes a fence, too, before its block's threads meet again and read. The count begins
// again by itself: atomicInc() goes from the last block to 0.
GRADFERRY_DEVICE bool is_last_block(uint32_t* blocks_done) {
  __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(blocks_done, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  return __syncthreads_or(is_last ? 1 : 0) != 0;
}

// A sum per message that is received, then one per message that is sent.
GRADFERRY_DEVICE uint64_t* sums_of(const ChunkBatch& chunk) {
  return reinterpret_cast<uint64_t*>(chunk.progress + 1);
}

GRADFERRY_DEVICE Envelope envelope_of(const ChunkBatch& chunk, Phase phase) {
  Envelope envelope = chunk.envelope;
  envelope.phase = phase;
  return envelope;
}

template <typename Options>
GRADFERRY_DEVICE Options options_of(const ChunkCodec& codec) {
  Options options{};
  if constexpr (!std::is_empty_v<Options>) {
    __builtin_memcpy(&options, codec.options.storage, sizeof(options));
  }
  return options;
}

// The block's tile, and what its codec's function needs of the ChunkBatch.
struct TileJob {
  const ChunkTile& entry;  // in device memory, as is the codec
  const ChunkCodec& codec;
  uint64_t seed;
  uint64_t step;
};
GRADFERRY_DEVICE TileJob job_of(const ChunkBatch& chunk) {
  const ChunkTile& entry = chunk.tiles[blockIdx.x];
  return {entry, chunk.codecs[entry.codec], chunk.seed, chunk.envelope.step};
}
GRADFERRY_DEVICE float* residual_of(const ChunkTile& entry, float* residual) {
  return entry.has_residual != 0 ? residual : nullptr;
}

template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE TileUnit<typename Codec::Options> unit_of(const ChunkTile& entry,
                                                           const ChunkCodec& codec, uint64_t seed,
                                                           uint64_t step, Stage stage) {
  return make_unit<Codec, dtype>(entry.tile, stage, seed, step,
                                 options_of<typename Codec::Options>(codec));
}

// Judges the messages, whose checksums are known by now: `sums`, or 0 if that is null. Whether one
// is refused. Only the last block may call it.
GRADFERRY_DEVICE bool judge_messages(const ChunkBatch& chunk, const ReceivedMessages& received,
                                     const uint64_t* sums, Findings* findings) {
  const auto judged = [&](uint32_t m) {
    const Message message = received.messages[m];
    return judge(received.buffer + message.offset, envelope_of(chunk, message.phase), message.rank,
                 message.payload_bytes, sums == nullptr ? 0 : sums[m]);
  };
  bool refused = false;
  for (uint32_t m = threadIdx.x; m < received.num_messages; m += kTileThreads) {
    const WireStatus verdict = judged(m).status;
    received.verdicts[m] = static_cast<uint32_t>(verdict);
    refused |= verdict != WireStatus::kOk;
  }
  if (__syncthreads_or(refused ? 1 : 0) == 0) return false;
  if (threadIdx.x == 0) {
    for (uint32_t m = 0; m < received.num_messages; ++m) {
      if (received.verdicts[m] != 0) note(findings, judged(m));
    }
  }
  __syncthreads();
  return true;
}

// The same of messages with checksums, which are forgotten.
GRADFERRY_DEVICE bool check_messages(const ChunkBatch& chunk, const ReceivedMessages& received,
                                     Findings* findings) {
  uint64_t* sums = sums_of(chunk);
  const bool refused = judge_messages(chunk, received, sums, findings);
  for (uint32_t m = threadIdx.x; m < received.num_messages; m += kTileThreads) sums[m] = 0;
  return refused;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
