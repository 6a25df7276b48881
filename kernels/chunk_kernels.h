// The kernels of a chunk: a block of 128 threads per tile (kernels/common/tile_kernels.h), with
// whatever codec the tile's entry names, and the messages' headers by the last block that is done.
//
// A kernel is instantiated for a set of codecs (chunk_launch.h). All threads of a block have the
// same tile, so that the choice of its codec is no divergence; what it costs is registers, since a
// kernel takes those of its greediest codec.
//
// Checksums of messages are sums, to which every block adds its tile's by one atomic operation per
// message. So the last block has little to do where nothing is wrong: a header per message.
#pragma once

#include <type_traits>

#include "kernels/codec_rows.h"
#include "kernels/common/message_headers.h"
#include "kernels/common/tile_kernels.h"
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
GRADFERRY_DEVICE uint64_t* sums_of(const Chunk& chunk) {
  return reinterpret_cast<uint64_t*>(chunk.progress + 1);
}

GRADFERRY_DEVICE Envelope envelope_of(const Chunk& chunk, Phase phase) {
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

template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE TileUnit<typename Codec::Options> unit_of(const Chunk& chunk, const Tile& tile,
                                                           const ChunkCodec& codec, Stage stage) {
  return make_unit<Codec, dtype>(tile, stage, chunk.seed, chunk.envelope.step,
                                 options_of<typename Codec::Options>(codec));
}

// Judges the messages, whose checksums are known by now, and forgets the checksums. Whether one is
// refused. Only the last block may call it.
GRADFERRY_DEVICE bool check_messages(const Chunk& chunk, const ReceivedMessages& received,
                                     Phase phase, Findings* findings) {
  uint64_t* sums = sums_of(chunk);
  const auto judged = [&](uint32_t rank) {
    const Message message = received.messages[rank];
    return judge(received.buffer + message.offset, envelope_of(chunk, phase), rank,
                 message.payload_bytes, sums[rank]);
  };
  bool refused = false;
  for (uint32_t rank = threadIdx.x; rank < received.num_messages; rank += kTileThreads) {
    const WireStatus verdict = judged(rank).status;
    received.verdicts[rank] = static_cast<uint32_t>(verdict);
    refused |= verdict != WireStatus::kOk;
  }
  if (__syncthreads_or(refused ? 1 : 0) != 0) {
    refused = true;
    if (threadIdx.x == 0) {
      for (uint32_t rank = 0; rank < received.num_messages; ++rank) {
        if (received.verdicts[rank] != 0) note(findings, judged(rank));
      }
    }
    __syncthreads();
  }
  for (uint32_t rank = threadIdx.x; rank < received.num_messages; rank += kTileThreads) {
    sums[rank] = 0;
  }
  return refused;
}

// --- encode --------------------------------------------------------------------------------------

template <typename Codecs, ScalarType dtype>
__global__ void __launch_bounds__(kTileThreads, Codecs::kMinBlocks)
    encode_chunk_kernel(EncodeChunkCall call) {
  GRADFERRY_SHARED(StatusStorage<kTileThreads>, storage);
  const Chunk& chunk = call.chunk;
  const ChunkTile& entry = chunk.tiles[blockIdx.x];
  const Tile tile = entry.tile;
  const ChunkCodec& codec = chunk.codecs[entry.codec];
  float* residual = entry.has_residual != 0 ? call.residual : nullptr;
  StatusPart part{0, 0};
  if constexpr (dtype == ScalarType::kFloat64) {
    part = exact_float64::encode_tile(tile, chunk.hold_zero_tiles,
                                      static_cast<const double*>(call.gradient), codec.alpha,
                                      call.gain, residual, call.out);
  } else {
    const auto with_codec = [&](auto f) {
      Codecs::with(codec.row, [&]<typename Codec>() {
        f.template operator()<Codec>(unit_of<Codec, dtype>(chunk, tile, codec, Stage::kWorker));
      });
    };
    part = encode_tile<dtype>(with_codec, tile, chunk.hold_zero_tiles,
                              static_cast<const std::byte*>(call.gradient), codec.alpha, call.gain,
                              residual, call.out);
  }
  if (call.num_messages == 0) return;
  const StatusPart all = combine_status<kTileThreads>(storage, part);
  uint64_t* sums = sums_of(chunk);
  if (threadIdx.x == 0) add_to(sums + entry.message, all.checksum);
  if (!is_last_block(&chunk.progress->blocks_done)) return;

  const Envelope envelope = envelope_of(chunk, Phase::kScatter);
  for (uint32_t m = threadIdx.x; m < call.num_messages; m += kTileThreads) {
    const Message message = call.messages[m];
    write_header(call.out + message.offset, make_header(envelope, message.payload_bytes, sums[m]));
    sums[m] = 0;
  }
}

// --- reduce --------------------------------------------------------------------------------------

// Adds the tile's payloads to the checksums of the messages that hold them. Whether, in the view of
// this thread, all of them are zero. A warp takes every fourth message.
GRADFERRY_DEVICE bool sum_payloads(const ReceivedMessages& received, uint32_t payload_offset,
                                   uint32_t num_bytes, uint64_t* sums) {
  const uint32_t warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  uint32_t seen = 0;
  for (uint32_t rank = warp; rank < received.num_messages; rank += kTileThreads / kWarpLanes) {
    const std::byte* payloads = received.buffer + received.messages[rank].offset + kHeaderBytes;
    const PayloadPart part =
        sum_words(payloads + payload_offset, num_bytes, payload_offset, 16 * lane, 16 * kWarpLanes);
    seen |= part.seen;
    const uint64_t sum = warp_sum(part.sum);
    if (lane == 0) add_to(sums + rank, sum);
  }
  return seen == 0;
}

// The payload's format does not depend on the dtype, except that of `exact`.
template <typename Codec, typename F>
GRADFERRY_DEVICE void with_payload_dtype(ScalarType dtype, F f) {
  if constexpr (Codec::kUsesDtype) {
    switch (dtype) {
      case ScalarType::kBFloat16: return f.template operator()<ScalarType::kBFloat16>();
      case ScalarType::kFloat16: return f.template operator()<ScalarType::kFloat16>();
      default: break;
    }
  }
  f.template operator()<ScalarType::kFloat32>();
}

template <typename Codecs, bool kIsFloat64>
GRADFERRY_DEVICE StatusPart reduce_entry(const ReduceChunkCall& call, const Tile& tile,
                                         const ChunkCodec& codec, float* residual) {
  const Chunk& chunk = call.chunk;
  const ReceivedMessages& received = call.received;
  std::byte* out = call.out + kHeaderBytes;
  const auto payload_of = [&](uint32_t rank) {
    return received.buffer + received.messages[rank].offset + kHeaderBytes;
  };
  const auto sum = [&](uint32_t num_bytes) {
    const bool is_zero = sum_payloads(received, tile.payload_offset, num_bytes, sums_of(chunk));
    return chunk.hold_zero_tiles && __syncthreads_or(is_zero ? 0 : 1) == 0;
  };
  if constexpr (kIsFloat64) {
    const bool is_zero = sum(exact_float64::payload_bytes(tile.num_elements));
    return exact_float64::reduce_tile(tile, is_zero, payload_of, received.num_messages, call.gain,
                                      residual, out);
  } else {
    const auto with_codec = [&](auto f) {
      Codecs::with(codec.row, [&]<typename Codec>() {
        with_payload_dtype<Codec>(chunk.dtype, [&]<ScalarType dtype>() {
          f.template operator()<Codec, dtype>(
              unit_of<Codec, dtype>(chunk, tile, codec, Stage::kWorker),
              unit_of<Codec, dtype>(chunk, tile, codec, Stage::kOwner));
        });
      });
    };
    uint32_t num_bytes = 0;
    with_codec([&]<typename Codec, ScalarType>(const auto& unit, const auto&) {
      num_bytes = unit.payload_bytes;
    });
    return reduce_tile(with_codec, tile, sum(num_bytes), payload_of, received.num_messages,
                       call.gain, residual, out);
  }
}

// A rank that owns no tile of the chunk has one block without a tile.
template <typename Codecs, bool kIsFloat64>
__global__ void __launch_bounds__(kTileThreads, Codecs::kMinBlocks)
    reduce_chunk_kernel(ReduceChunkCall call) {
  GRADFERRY_SHARED(StatusStorage<kTileThreads>, storage);
  const Chunk& chunk = call.chunk;
  uint64_t* sum_sent = sums_of(chunk) + call.received.num_messages;
  if (blockIdx.x < chunk.num_tiles) {
    const ChunkTile& entry = chunk.tiles[blockIdx.x];
    const Tile tile = entry.tile;
    const StatusPart part = reduce_entry<Codecs, kIsFloat64>(
        call, tile, chunk.codecs[entry.codec], entry.has_residual != 0 ? call.residual : nullptr);
    const StatusPart all = combine_status<kTileThreads>(storage, part);
    if (threadIdx.x == 0) {
      add_to(sum_sent, all.checksum);
      if ((all.flags & kTileCorrupt) != 0) atomicAdd(&chunk.progress->corrupt_tiles, 1);
    }
  }
  if (!is_last_block(&chunk.progress->blocks_done)) return;

  check_messages(chunk, call.received, Phase::kScatter, call.findings);
  if (threadIdx.x != 0) return;
  const Envelope envelope = envelope_of(chunk, Phase::kGather);
  if (const uint32_t corrupt = chunk.progress->corrupt_tiles; corrupt != 0) {
    note(call.findings, {WireStatus::kCorruptPayload, Phase::kScatter, envelope.rank, envelope.step,
                         envelope.chunk, 0, corrupt});
    chunk.progress->corrupt_tiles = 0;
  }
  write_header(call.out,
               make_header(envelope, call.payload_bytes, *sum_sent, call.findings->status));
  *sum_sent = 0;
}

// --- decode --------------------------------------------------------------------------------------

// Adds to an element of a residual, if the sum is finite.
GRADFERRY_DEVICE void add_finite(float* residual, float x) {
  const float sum = *residual + x;
  if (!is_not_finite(sum)) *residual = sum;
}

// What becomes of a tile that is not finite, in two steps, before which everything is decoded anew
// and one element at a time: so that nothing takes registers for this.
//
// Where another rank's gradient was not finite, what this rank sent has no effect: it is put back
// into the residual while the bucket still holds this rank's own gradient. Returns which of the
// lane's elements these are: bit j is element j.
template <typename Codec, ScalarType dtype>
GRADFERRY_RARE uint32_t undo_lost(const ChunkTile& entry, const ChunkCodec& codec, uint64_t seed,
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
  Codec::template decode<dtype>(own_unit, sent + tile.output_offset, [&](uint32_t j, float x) {
    const uint32_t element = unit.slice.element(j / kQuad) + j % kQuad;
    if ((lost >> j & 1) == 0 || element >= unit.slice.num_elements) return;
    const float own = load_item<dtype>(gradient + element * item_bytes(dtype));
    add_finite(residual + element, x - codec.alpha * own);
  });
  return lost;
}

// Writes the tile. Returns flags.
template <typename Codec, ScalarType dtype>
GRADFERRY_RARE uint32_t store_rest(const ChunkTile& entry, const ChunkCodec& codec, uint64_t seed,
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

// Returns flags. with_codec as in encode_tile(). The block's sum of the payload comes first: it
// brings closer what is then read again.
template <ScalarType dtype, typename WithCodec>
GRADFERRY_DEVICE uint32_t decode_entry(WithCodec with_codec, const DecodeChunkCall& call,
                                       const ChunkTile& entry, const Tile& tile,
                                       const ChunkCodec& codec) {
  const Slice slice(tile.num_elements);
  const std::byte* in = call.received.buffer;
  auto* gradient = static_cast<std::byte*>(call.gradient);
  float* residual = entry.has_residual != 0 ? call.residual : nullptr;
  float v[kLaneElements];
  uint32_t flags = 0;
  with_codec([&]<typename Codec>(const TileUnit<typename Codec::Options>& unit) {
    flags = decode_values<Codec, dtype>(unit, in + tile.payload_offset, v);
  });
  clear_beyond_end(slice, v);
  if (residual != nullptr) {
    uint32_t largest = 0;
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) largest = maximum(largest, magnitude_bits(v[j]));
    if (__syncthreads_or(largest >= kLeastInfinite<dtype> ? 1 : 0) != 0) {
      with_codec([&]<typename Codec>(const TileUnit<typename Codec::Options>& unit) {
        const uint32_t lost = undo_lost<Codec, dtype>(entry, codec, unit.seed, unit.step, in,
                                                      call.sent, gradient, residual);
        flags = store_rest<Codec, dtype>(entry, codec, unit.seed, unit.step, in, lost, gradient,
                                         residual);
      });
      return flags;
    }
  }
  return flags | store_values<dtype>(slice, tile, v, gradient, codec.beta, residual);
}

GRADFERRY_DEVICE void fill_nan(void* gradient, const Tile& tile, ScalarType dtype) {
  const uint32_t item = item_bytes(dtype);
  std::byte* first = static_cast<std::byte*>(gradient) + tile.gradient_offset * item;
  for (uint32_t i = threadIdx.x; i < tile.num_elements; i += kTileThreads) {
    std::byte* element = first + uint64_t{i} * item;
    switch (dtype) {
      case ScalarType::kFloat32: write(element, kNanBits); break;
      case ScalarType::kBFloat16: write(element, uint16_t{0x7fc0}); break;
      case ScalarType::kFloat16: write(element, uint16_t{0x7e00}); break;
      case ScalarType::kFloat64: write(element, uint64_t{0x7ff8000000000000}); break;
    }
  }
}

// What is left to do if a message was refused or a tile is not finite: neither happens often.
GRADFERRY_DEVICE void conclude(const DecodeChunkCall& call) {
  constexpr uint32_t kNone = 0xffffffffu;
  GRADFERRY_SHARED(Minima, corrupt_minima);
  GRADFERRY_SHARED(Minima, nonfinite_minima);
  const Chunk& chunk = call.chunk;
  const auto is_refused = [&](uint32_t i) {
    return call.received.num_messages != 0 && call.received.verdicts[chunk.tiles[i].message] != 0;
  };
  uint32_t corrupt = kNone, nonfinite = kNone;
  for (uint32_t i = threadIdx.x; i < chunk.num_tiles; i += kTileThreads) {
    const bool refused = is_refused(i);
    const uint32_t flags = call.flags[i];
    if (!refused && (flags & kTileCorrupt) != 0 && i < corrupt) corrupt = i;
    if ((refused || (flags & kTileNonFinite) != 0) && i < nonfinite) nonfinite = i;
  }
  corrupt = block_minimum(corrupt_minima, corrupt);
  nonfinite = block_minimum(nonfinite_minima, nonfinite);
  if (threadIdx.x == 0 && corrupt != kNone) {
    note(call.findings, {WireStatus::kCorruptPayload, Phase::kGather, chunk.tiles[corrupt].message,
                         chunk.envelope.step, chunk.envelope.chunk, 0, 1});
  }
  if (threadIdx.x == 0 && nonfinite != kNone) {
    if (call.findings->nonfinite_tile == 0) {
      call.findings->nonfinite_tile = chunk.tiles[nonfinite].tile.id + 1;
    }
    if (call.step_nonfinite != nullptr) *call.step_nonfinite = 1;
  }
  for (uint32_t i = 0; i < chunk.num_tiles; ++i) {
    if (is_refused(i)) fill_nan(call.gradient, chunk.tiles[i].tile, chunk.dtype);
  }
}

template <typename Codecs, ScalarType dtype>
__global__ void __launch_bounds__(kTileThreads, Codecs::kMinBlocks)
    decode_chunk_kernel(DecodeChunkCall call) {
  GRADFERRY_SHARED(StatusStorage<kTileThreads>, storage);
  const Chunk& chunk = call.chunk;
  const ChunkTile& entry = chunk.tiles[blockIdx.x];
  const Tile tile = entry.tile;
  const ChunkCodec& codec = chunk.codecs[entry.codec];
  const std::byte* payload = call.received.buffer + tile.payload_offset;
  StatusPart part{0, 0};
  const auto sum = [&](uint32_t num_bytes) {
    part.checksum =
        sum_words(payload, num_bytes, tile.message_offset, 16 * threadIdx.x, 16 * kTileThreads).sum;
  };
  if constexpr (dtype == ScalarType::kFloat64) {
    sum(exact_float64::payload_bytes(tile.num_elements));
    part.flags = exact_float64::decode_tile(
        tile, call.sent + tile.output_offset, payload, static_cast<double*>(call.gradient),
        codec.alpha, codec.beta, entry.has_residual != 0 ? call.residual : nullptr);
  } else {
    const auto with_codec = [&](auto f) {
      Codecs::with(codec.row, [&]<typename Codec>() {
        f.template operator()<Codec>(unit_of<Codec, dtype>(chunk, tile, codec, Stage::kOwner));
      });
    };
    with_codec([&]<typename Codec>(const TileUnit<typename Codec::Options>& unit) {
      sum(unit.payload_bytes);
    });
    part.flags = decode_entry<dtype>(with_codec, call, entry, tile, codec);
  }
  const StatusPart all = combine_status<kTileThreads>(storage, part);
  if (threadIdx.x == 0) {
    call.flags[blockIdx.x] = all.flags;
    if (all.flags != 0) atomicOr(&chunk.progress->flags, all.flags);
    if (call.received.num_messages != 0) add_to(sums_of(chunk) + entry.message, all.checksum);
  }
  if (!is_last_block(&chunk.progress->blocks_done)) return;

  const bool refused = check_messages(chunk, call.received, Phase::kGather, call.findings);
  const bool unusual = chunk.progress->flags != 0;
  __syncthreads();
  if (threadIdx.x == 0) chunk.progress->flags = 0;
  if (refused || unusual) conclude(call);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
