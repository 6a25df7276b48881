// Sets of codecs that a chunk's tiles may have, each with kernels of its own, and their launchers.
#pragma once

#include "kernels/cuda/chunk_accumulate.h"
#include "kernels/cuda/chunk_decode.h"
#include "kernels/cuda/chunk_encode.h"
#include "kernels/cuda/chunk_reduce.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// `exact` and one other: what nearly every chunk holds. Small parameters are exact, and so cheap
// that a kernel for both takes about the registers of the other.
template <typename Other>
struct WithExact {
  static constexpr bool kIsExactAlone = std::is_same_v<Other, exact::TileCodec>;
  static constexpr bool kHasFloat64 = kIsExactAlone;
  // Without a bound the compiler takes twice the registers, to load further ahead.
  static constexpr uint32_t kMinBlocks = Other::kMinBlocks == 0 ? 4 : Other::kMinBlocks;

  // Calls f with the codec of a row of the table.
  template <typename F>
  GRADFERRY_DEVICE static void with([[maybe_unused]] uint32_t row, F f) {
    if constexpr (!kIsExactAlone) {
      if (row != static_cast<uint32_t>(CodecRow::exact)) return f.template operator()<Other>();
    }
    f.template operator()<exact::TileCodec>();
  }
};

// Calls f with the dtype as a compile-time constant.
template <typename Codecs, typename F>
void with_chunk_dtype(ScalarType dtype, F f) {
  switch (dtype) {
    case ScalarType::kFloat32: return f.template operator()<ScalarType::kFloat32>();
    case ScalarType::kBFloat16: return f.template operator()<ScalarType::kBFloat16>();
    case ScalarType::kFloat16: return f.template operator()<ScalarType::kFloat16>();
    case ScalarType::kFloat64: break;
  }
  if constexpr (Codecs::kHasFloat64) {
    f.template operator()<ScalarType::kFloat64>();
  } else {
    throw Error(ErrorKind::kConfig, "this codec has no float64 kernels; use codec exact");
  }
}

template <typename Codecs>
struct ChunkLauncher {
  static void encode(const EncodeChunkCall& call) {
    with_chunk_dtype<Codecs>(call.chunk.dtype, [&]<ScalarType dtype>() {
      launch<encode_chunk_kernel<Codecs, dtype>>(call.chunk.num_tiles, kTileThreads,
                                                 call.chunk.stream, call);
    });
  }
  static void reduce(const ReduceChunkCall& call) {
    const uint32_t num_blocks = call.chunk.num_tiles == 0 ? 1 : call.chunk.num_tiles;
    with_chunk_dtype<Codecs>(call.chunk.dtype, [&]<ScalarType dtype>() {
      launch<reduce_chunk_kernel<Codecs, dtype == ScalarType::kFloat64>>(num_blocks, kTileThreads,
                                                                         call.chunk.stream, call);
    });
  }
  static void decode(const DecodeChunkCall& call) {
    with_chunk_dtype<Codecs>(call.chunk.dtype, [&]<ScalarType dtype>() {
      launch<decode_chunk_kernel<Codecs, dtype>>(call.chunk.num_tiles, kTileThreads,
                                                 call.chunk.stream, call);
    });
  }
  static void accumulate(const AccumulateChunkCall& call) {
    const uint32_t num_blocks = call.chunk.num_tiles == 0 ? 1 : call.chunk.num_tiles;
    with_chunk_dtype<Codecs>(call.chunk.dtype, [&]<ScalarType dtype>() {
      launch<accumulate_chunk_kernel<Codecs, dtype == ScalarType::kFloat64>>(
          num_blocks, kTileThreads, call.chunk.stream, call);
    });
  }

  static constexpr ChunkKernels kernels() { return {&encode, &reduce, &decode, &accumulate}; }
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
