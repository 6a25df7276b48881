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
  static constexpr CodecRow kRow = Other::kRow;
  static constexpr bool kHasFloat64 = std::is_same_v<Other, exact::TileCodec>;

  template <typename F>
  GRADFERRY_DEVICE static void each(F f) {
    f.template operator()<Other>();
    if constexpr (!kHasFloat64) f.template operator()<exact::TileCodec>();
  }
};

// Calls of a chunk's tiles that have the codecs of a set. `concludes`: it is the chunk's last one.
struct CodecKernels {
  void (*encode)(const EncodeChunkCall& call, bool concludes);
  void (*reduce)(const ReduceChunkCall& call, bool concludes);
  void (*decode)(const DecodeChunkCall& call, bool concludes);
  void (*accumulate)(const AccumulateChunkCall& call, bool concludes);
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

template <auto kKernel, typename Call>
void launch_tiles(const Call& call, bool concludes) {
  const uint32_t tiles = call.chunk.num_tiles;
  const uint32_t grid = grid_for(reinterpret_cast<const void*>(kKernel), kTileThreads, tiles);
  launch<kKernel>(grid, kTileThreads, call.chunk.stream, call,
                  Share{tiles / grid, tiles % grid, concludes});
}

template <typename Codecs>
struct ChunkLauncher {
  static void encode(const EncodeChunkCall& call, bool concludes) {
    with_chunk_dtype<Codecs>(call.chunk.dtype, [&]<ScalarType dtype>() {
      if (call.chunk.num_tiles == 0) return;
      launch_tiles<encode_chunk_kernel<Codecs, dtype>>(call, concludes);
    });
  }
  static void reduce(const ReduceChunkCall& call, bool concludes) {
    with_chunk_dtype<Codecs>(call.chunk.dtype, [&]<ScalarType dtype>() {
      launch_tiles<reduce_chunk_kernel<Codecs, dtype == ScalarType::kFloat64>>(call, concludes);
    });
  }
  static void decode(const DecodeChunkCall& call, bool concludes) {
    with_chunk_dtype<Codecs>(call.chunk.dtype, [&]<ScalarType dtype>() {
      if (call.chunk.num_tiles == 0) return;
      launch_tiles<decode_chunk_kernel<Codecs, dtype>>(call, concludes);
    });
  }
  static void accumulate(const AccumulateChunkCall& call, bool concludes) {
    with_chunk_dtype<Codecs>(call.chunk.dtype, [&]<ScalarType dtype>() {
      launch_tiles<accumulate_chunk_kernel<Codecs, dtype == ScalarType::kFloat64>>(call, concludes);
    });
  }

  static constexpr CodecKernels kernels() { return {&encode, &reduce, &decode, &accumulate}; }
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
