// The kernels of a chunk: blocks of 128 threads, which take tiles in turn, each tile with the codec
// that its entry names, and the messages' headers by the last block that is done.
//
// A kernel is instantiated for a set of codecs (chunk_launch.h). All threads of a block have the
// same tile, so that the choice of its codec is no divergence. A set gives
//
//   kRow         the codec by whose bounds the kernels are compiled (chunk_bounds.h)
//   kHasFloat64  there are kernels for fp64 gradients, which only `exact` has
//   each(f)      calls f.operator()<Codec>() for each codec: a loop over tiles of its own, so that
//                one codec's registers are nothing to another's
//
// Checksums of messages are sums, to which every block adds its part, once for most messages. So
// the last block has little to do where nothing is wrong: a header per message.
#pragma once

#include <type_traits>

#include "kernels/cuda/chunk_bounds.h"
#include "kernels/cuda/message_headers.h"
#include "kernels/cuda/tile_kernels.h"
#include "kernels/exact/exact_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// --- device helpers ------------------------------------------------------------------------------

// Whether all other blocks of the launch are done. Then everything that they wrote is visible to
// all threads of this one: each block's threads write and meet at the barrier, and thread 0 counts
// the block by an operation that releases what it knows of the others, and acquires what those that
// were counted before have released, before its block's threads meet again and read. The count
// begins again by itself: it goes from the last block to 0.
GRADFERRY_DEVICE bool is_last_block(uint32_t* blocks_done) {
  __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(blocks_done)), "r"(gridDim.x - 1)
                 : "memory");
    is_last = before == gridDim.x - 1;
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

// --- checksums

// Sums of the messages as far as the block got, by warp: only its first lane touches its own.
inline constexpr uint32_t kSumsInShared = 64;  // of further messages they go to memory at once
using BlockSums = uint64_t[kTileWarps][kSumsInShared];
GRADFERRY_DEVICE BlockSums& block_sums() {
  GRADFERRY_SHARED(BlockSums, shared);
  return shared;
}
// part: the thread's, of the checksum of a payload of the message.
GRADFERRY_DEVICE void add_sum(uint64_t* sums, uint32_t message, uint64_t part) {
  const uint64_t sum = warp_sum(part);
  if (threadIdx.x % kWarpLanes != 0) return;
  if (message < kSumsInShared) {
    block_sums()[threadIdx.x / kWarpLanes][message] += sum;
  } else {
    rare_path();
    add_to(sums + message, sum);
  }
}
GRADFERRY_DEVICE void flush_sums(uint64_t* sums, uint32_t num_messages) {
  __syncthreads();
  for (uint32_t m = threadIdx.x; m < num_messages && m < kSumsInShared; m += kTileThreads) {
    uint64_t all = 0;
    for (uint32_t w = 0; w < kTileWarps; ++w) all += block_sums()[w][m];
    if (all != 0) add_to(sums + m, all);
  }
}

// --- tiles

// What a launch does: blocks have `each` tiles, the first `more` of them one more. It concludes if
// it is the chunk's last one.
struct Share {
  uint32_t each, more;
  bool concludes;
};

// Entries of neighbouring tiles, loaded together: the way to a tile is one load shorter.
inline constexpr uint32_t kStagedTiles = 16;

// Calls f.operator()<Codec>(the tile's index, its entry, its codec) for the block's tiles.
template <typename Codecs, typename F>
GRADFERRY_DEVICE void for_tiles(const ChunkBatch& chunk, const Share& share, F f) {
  GRADFERRY_SHARED(ChunkTile, staged[kStagedTiles]);
  constexpr uint32_t kEntryWords = sizeof(ChunkTile) / sizeof(Bytes8);
  static_assert(sizeof(ChunkTile) % sizeof(Bytes8) == 0 &&
                kStagedTiles * kEntryWords <= kTileThreads);
  for (uint32_t m = threadIdx.x; m < kTileWarps * kSumsInShared; m += kTileThreads) {
    block_sums()[m / kSumsInShared][m % kSumsInShared] = 0;
  }
  const uint32_t block = blockIdx.x;
  uint32_t first = block * share.each + (block < share.more ? block : share.more);
  const uint32_t end = first + share.each + (block < share.more ? 1 : 0);
  for (; first < end; first += kStagedTiles) {
    const uint32_t count = end - first < kStagedTiles ? end - first : kStagedTiles;
    if (threadIdx.x < count * kEntryWords) {
      const auto* entries = reinterpret_cast<const Bytes8*>(chunk.tiles + first);
      reinterpret_cast<Bytes8*>(staged)[threadIdx.x] = entries[threadIdx.x];
    }
    __syncthreads();
    Codecs::each([&]<typename Codec>() {
      constexpr auto kRow = static_cast<uint32_t>(Codec::kRow);
      if ((chunk.rows >> kRow & 1) == 0) return;
      for (uint32_t i = 0; i < count; ++i) {
        const ChunkTile& entry = staged[i];
        const ChunkCodec& codec = chunk.codecs[entry.codec];
        if (codec.row == kRow) f.template operator()<Codec>(first + i, entry, codec);
      }
    });
    __syncthreads();
  }
}

// The flags of all threads, in all of them: mostly there are none.
GRADFERRY_DEVICE uint32_t block_flags(uint32_t flags) {
  if (__syncthreads_or(flags != 0 ? 1 : 0) == 0) return 0;
  rare_path();
  const bool corrupt = __syncthreads_or((flags & kTileCorrupt) != 0 ? 1 : 0) != 0;
  const bool non_finite = __syncthreads_or((flags & kTileNonFinite) != 0 ? 1 : 0) != 0;
  return (corrupt ? kTileCorrupt : 0) | (non_finite ? kTileNonFinite : 0);
}

GRADFERRY_DEVICE float* residual_of(const ChunkTile& entry, float* residual) {
  return entry.has_residual != 0 ? residual : nullptr;
}

template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE TileUnit<typename Codec::Options> unit_of(const ChunkBatch& chunk,
                                                           const ChunkTile& entry,
                                                           const ChunkCodec& codec, Stage stage) {
  typename Codec::Options options{};
  if constexpr (!std::is_empty_v<decltype(options)>) {
    __builtin_memcpy(&options, codec.options.storage, sizeof(options));
  }
  const uint32_t n = entry.tile.num_elements;
  return {Slice(n, Codec::kByBlocks),
          stage,
          Codec::payload_bytes(n, dtype, stage, options),
          entry.tile.id,
          chunk.seed,
          chunk.envelope.step,
          options};
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
