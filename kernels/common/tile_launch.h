// The launchers of tile_kernels.h: from the functions of the codec contract to kernels. Nothing
// here waits for the device.
#pragma once

#include "kernels/common/tile_kernels.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Calls f with the dtype as a compile-time constant. fp64 is `exact`'s own business.
template <typename F>
void with_gradient_dtype(ScalarType dtype, F f) {
  switch (dtype) {
    case ScalarType::kFloat32: return f.template operator()<ScalarType::kFloat32>();
    case ScalarType::kBFloat16: return f.template operator()<ScalarType::kBFloat16>();
    case ScalarType::kFloat16: return f.template operator()<ScalarType::kFloat16>();
    case ScalarType::kFloat64: break;
  }
  throw Error(ErrorKind::kConfig, "this codec has no float64 kernels; use codec exact");
}

template <typename Options>
BatchArguments<Options> arguments_of(const TileBatch& batch) {
  Options options{};
  if constexpr (!std::is_empty_v<Options>) options = batch.options->as<Options>();
  return {batch.tiles, batch.status, batch.seed,           batch.step,
          options,     batch.stage,  batch.hold_zero_tiles};
}

// The codec contract for the kernels of one codec class.
template <typename Codec>
struct TileLauncher {
  static void encode(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
                     float* residual, std::byte* out) {
    const auto arguments = arguments_of<typename Codec::Options>(batch);
    const auto* g = static_cast<const std::byte*>(gradient);
    with_gradient_dtype(batch.dtype, [&]<ScalarType dtype>() {
      if (residual != nullptr) {
        launch<encode_kernel<Codec, dtype, true>>(batch.num_tiles, kTileThreads, batch.stream,
                                                  arguments, g, alpha, gain, residual, out);
      } else {
        launch<encode_kernel<Codec, dtype, false>>(batch.num_tiles, kTileThreads, batch.stream,
                                                   arguments, g, alpha, gain, residual, out);
      }
    });
  }

  static void decode(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
                     float* residual) {
    const auto arguments = arguments_of<typename Codec::Options>(batch);
    auto* g = static_cast<std::byte*>(gradient);
    with_gradient_dtype(batch.dtype, [&]<ScalarType dtype>() {
      launch<decode_kernel<Codec, dtype>>(batch.num_tiles, kTileThreads, batch.stream, arguments,
                                          in, g, beta, residual);
    });
  }

  static void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank,
                     uint32_t world_size, const float* gain, float* owner_residual,
                     std::byte* out) {
    const auto arguments = arguments_of<typename Codec::Options>(batch);
    const ScalarType dtype_of_payload = Codec::kUsesDtype ? batch.dtype : ScalarType::kFloat32;
    const auto start = [&]<ScalarType dtype>() {
      if (owner_residual != nullptr) {
        launch<reduce_kernel<Codec, dtype, true>>(batch.num_tiles, kTileThreads, batch.stream,
                                                  arguments, payload_by_rank, world_size, gain,
                                                  owner_residual, out);
      } else {
        launch<reduce_kernel<Codec, dtype, false>>(batch.num_tiles, kTileThreads, batch.stream,
                                                   arguments, payload_by_rank, world_size, gain,
                                                   owner_residual, out);
      }
    };
    if constexpr (Codec::kUsesDtype) {
      with_gradient_dtype(dtype_of_payload, start);
    } else {
      start.template operator()<ScalarType::kFloat32>();
    }
  }

  static void accumulate(const TileBatch& batch, const std::byte* const* payload_by_rank,
                         uint32_t world_size, uint32_t divisor, void* gradient) {
    const auto arguments = arguments_of<typename Codec::Options>(batch);
    auto* g = static_cast<std::byte*>(gradient);
    with_gradient_dtype(batch.dtype, [&]<ScalarType dtype>() {
      launch<accumulate_kernel<Codec, dtype>>(batch.num_tiles, kTileThreads, batch.stream,
                                              arguments, payload_by_rank, world_size, divisor, g);
    });
  }

  static void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
                   const void* gradient, float alpha, float* residual) {
    const auto arguments = arguments_of<typename Codec::Options>(batch);
    const auto* g = static_cast<const std::byte*>(gradient);
    with_gradient_dtype(batch.dtype, [&]<ScalarType dtype>() {
      launch<undo_kernel<Codec, dtype>>(batch.num_tiles, kTileThreads, batch.stream, arguments,
                                        own_payload, in, g, alpha, residual);
    });
  }

  static constexpr CodecFunctions functions() {
    return {&encode, &decode, &reduce, &accumulate, &undo};
  }
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
