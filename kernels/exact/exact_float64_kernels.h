// Kernels for batches of fp64 tiles, and their launchers.
#pragma once

#include "kernels/common/tile_launch.h"
#include "kernels/exact/exact_float64_tiles.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact_float64 {

using Batch = BatchArguments<NoOptions>;

__global__ void __launch_bounds__(kTileThreads)
    encode_kernel(Batch batch, const double* gradient, double alpha, const float* gain,
                  float* residual, std::byte* out) {
  finish(batch, encode_tile(batch.tiles[blockIdx.x], batch.hold_zero_tiles, gradient, alpha, gain,
                            residual, out));
}

__global__ void __launch_bounds__(kTileThreads)
    decode_kernel(Batch batch, const std::byte* in, double* gradient, double beta,
                  float* residual) {
  const Tile tile = batch.tiles[blockIdx.x];
  uint32_t flags = 0;
  for (uint32_t i = threadIdx.x; i < tile.num_elements; i += kTileThreads) {
    const double value = read<double>(in + tile.payload_offset + 8 * i);
    flags |= flags_of(value);
    if (gradient == nullptr) continue;
    write(gradient + tile.gradient_offset + i, canonical_bits(value));
    if (residual == nullptr || beta == 0.0) continue;
    add_element(tile, i, value, beta, residual);
  }
  finish(batch, {0, flags});
}

__global__ void __launch_bounds__(kTileThreads)
    reduce_kernel(Batch batch, const std::byte* const* payload_by_rank, uint32_t world_size,
                  const float* gain, float* residual, std::byte* out) {
  const Tile tile = batch.tiles[blockIdx.x];
  const bool is_zero = batch.hold_zero_tiles &&
                       all_payloads_are_zero(payload_by_rank, world_size, tile.payload_offset,
                                             payload_bytes(tile.num_elements));
  finish(batch, reduce_tile(
                    tile, is_zero, [&](uint32_t rank) { return payload_by_rank[rank]; }, world_size,
                    gain, residual, out));
}

__global__ void __launch_bounds__(kTileThreads)
    accumulate_kernel(Batch batch, const std::byte* const* payload_by_rank, uint32_t world_size,
                      uint32_t divisor, double* gradient) {
  const Tile tile = batch.tiles[blockIdx.x];
  const double inverse = 1.0 / static_cast<double>(divisor);
  uint32_t flags = 0;
  for (uint32_t i = threadIdx.x; i < tile.num_elements; i += kTileThreads) {
    const double value = inverse * sum_ranks([&](uint32_t rank) { return payload_by_rank[rank]; },
                                             world_size, tile.payload_offset + 8 * i);
    flags |= flags_of(value);
    write(gradient + tile.gradient_offset + i, canonical_bits(value));
  }
  finish(batch, {0, flags});
}

__global__ void __launch_bounds__(kTileThreads)
    undo_kernel(Batch batch, const std::byte* own_payload, const std::byte* in,
                const double* gradient, double alpha, float* residual) {
  if (!holds_nonfinite(batch)) return;  // the whole block
  const Tile tile = batch.tiles[blockIdx.x];
  for (uint32_t i = threadIdx.x; i < tile.num_elements; i += kTileThreads) {
    if (flags_of(read<double>(in + tile.output_offset + 8 * i)) == 0) continue;
    undo_element(tile, i, own_payload + tile.payload_offset, gradient + tile.gradient_offset, alpha,
                 residual);
  }
}

// --- launchers -----------------------------------------------------------------------------------

inline void encode(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
                   float* residual, std::byte* out) {
  launch<encode_kernel>(batch.num_tiles, kTileThreads, batch.stream, arguments_of<NoOptions>(batch),
                        static_cast<const double*>(gradient), static_cast<double>(alpha), gain,
                        residual, out);
}

inline void decode(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
                   float* residual) {
  launch<decode_kernel>(batch.num_tiles, kTileThreads, batch.stream, arguments_of<NoOptions>(batch),
                        in, static_cast<double*>(gradient), static_cast<double>(beta), residual);
}

inline void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank,
                   uint32_t world_size, const float* gain, float* owner_residual, std::byte* out) {
  launch<reduce_kernel>(batch.num_tiles, kTileThreads, batch.stream, arguments_of<NoOptions>(batch),
                        payload_by_rank, world_size, gain, owner_residual, out);
}

inline void accumulate(const TileBatch& batch, const std::byte* const* payload_by_rank,
                       uint32_t world_size, uint32_t divisor, void* gradient) {
  launch<accumulate_kernel>(batch.num_tiles, kTileThreads, batch.stream,
                            arguments_of<NoOptions>(batch), payload_by_rank, world_size, divisor,
                            static_cast<double*>(gradient));
}

inline void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
                 const void* gradient, float alpha, float* residual) {
  launch<undo_kernel>(batch.num_tiles, kTileThreads, batch.stream, arguments_of<NoOptions>(batch),
                      own_payload, in, static_cast<const double*>(gradient),
                      static_cast<double>(alpha), residual);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact_float64
