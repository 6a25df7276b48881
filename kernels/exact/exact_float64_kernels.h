// The exact codec for fp64 gradients on CUDA: fp64 arithmetic, fp32 residuals. A block per tile,
// whose threads take its elements in turn; fp64 gradients are too rare for more. exact_float64.h is
// the same on CPU.
#pragma once

#include "kernels/common/tile_launch.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact_float64 {

constexpr uint64_t kInfinity64 = 0x7ff0000000000000u;
constexpr uint64_t kNan64 = 0x7ff8000000000000u;
constexpr uint64_t kMagnitude64 = 0x7fffffffffffffffu;

GRADFERRY_DEVICE uint64_t bits64(double x) {
  uint64_t result;
  __builtin_memcpy(&result, &x, sizeof(result));
  return result;
}
GRADFERRY_DEVICE uint32_t flags_of(double x) {
  return (bits64(x) & kMagnitude64) >= kInfinity64 ? kTileNonFinite : 0;
}
GRADFERRY_DEVICE uint64_t canonical_bits(double x) {
  return (bits64(x) & kMagnitude64) > kInfinity64 ? kNan64 : bits64(x);
}
GRADFERRY_DEVICE float residual_of(double updated, float otherwise) {
  const float rounded = static_cast<float>(updated);
  return is_not_finite(rounded) ? otherwise : rounded;
}
GRADFERRY_DEVICE uint32_t payload_bytes(uint32_t n) { return round_up(8 * n, kPayloadAlignment); }

// v to element i of the payload. Returns flags.
GRADFERRY_DEVICE uint32_t encode_element(PayloadWriter& out, uint32_t i, double v) {
  const uint64_t item = canonical_bits(v);
  out.words(8 * i, Bytes8{{static_cast<uint32_t>(item), static_cast<uint32_t>(item >> 32)}});
  return flags_of(v);
}

// What the last element leaves of the payload.
GRADFERRY_DEVICE void write_padding(PayloadWriter& out, uint32_t n) {
  out.zeros(8 * n, payload_bytes(n));
}

using Batch = BatchArguments<NoOptions>;

__global__ void __launch_bounds__(kTileThreads)
    encode_kernel(Batch batch, const double* gradient, double alpha, const float* gain,
                  float* residual, std::byte* out) {
  const Tile tile = batch.tiles[blockIdx.x];
  const uint32_t n = tile.num_elements;
  const double* g = gradient + tile.gradient_offset;
  float* r = residual == nullptr ? nullptr : residual + tile.residual_offset;
  PayloadWriter writer(out + tile.payload_offset, tile.message_offset);
  if (batch.hold_zero_tiles) {
    uint64_t seen = 0;
    for (uint32_t i = threadIdx.x; i < n; i += kTileThreads) seen |= bits64(g[i]) & kMagnitude64;
    if (__syncthreads_or(seen != 0 ? 1 : 0) == 0) {
      write_zero_payload(writer.payload, payload_bytes(n));
      if (r != nullptr) keep_residual(Slice(n), r, gain);
      set_status(batch, {0, 0});
      return;
    }
  }
  const double factor = gain == nullptr ? 1.0 : static_cast<double>(*gain);
  uint32_t flags = 0;
  for (uint32_t i = threadIdx.x; i < n; i += kTileThreads) {
    double v = alpha * g[i];
    if (r != nullptr) v = v + factor * static_cast<double>(r[i]);
    flags |= encode_element(writer, i, v);
    if (r != nullptr) r[i] = residual_of(v - v, kept_residual(r[i], gain));
  }
  write_padding(writer, n);
  finish(batch, writer.checksum, flags);
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
    float* r = residual + tile.residual_offset + i;
    *r = residual_of(static_cast<double>(*r) + beta * value, *r);
  }
  finish(batch, 0, flags);
}

__global__ void __launch_bounds__(kTileThreads)
    reduce_kernel(Batch batch, const std::byte* const* payload_by_rank, uint32_t world_size,
                  double inverse, const float* gain, float* residual, std::byte* out) {
  const Tile tile = batch.tiles[blockIdx.x];
  const uint32_t n = tile.num_elements;
  float* r = residual == nullptr ? nullptr : residual + tile.residual_offset;
  PayloadWriter writer(out + tile.output_offset, tile.message_offset);
  if (batch.hold_zero_tiles &&
      all_payloads_are_zero(payload_by_rank, world_size, tile.payload_offset, payload_bytes(n))) {
    write_zero_payload(writer.payload, payload_bytes(n));
    if (r != nullptr) keep_residual(Slice(n), r, gain);
    set_status(batch, {0, 0});
    return;
  }
  const double factor = gain == nullptr ? 1.0 : static_cast<double>(*gain);
  uint32_t flags = 0;
  for (uint32_t i = threadIdx.x; i < n; i += kTileThreads) {
    const uint32_t offset = tile.payload_offset + 8 * i;
    double v = read<double>(payload_by_rank[0] + offset);
    for (uint32_t rank = 1; rank < world_size; ++rank) {
      v = v + read<double>(payload_by_rank[rank] + offset);
    }
    v = v * inverse;
    if (r != nullptr) {
      v = v + factor * static_cast<double>(r[i]);
      r[i] = residual_of(v - v, kept_residual(r[i], gain));
    }
    flags |= encode_element(writer, i, v);
  }
  write_padding(writer, n);
  finish(batch, writer.checksum, flags);
}

__global__ void __launch_bounds__(kTileThreads)
    undo_kernel(Batch batch, const std::byte* own_payload, const std::byte* in,
                const double* gradient, double alpha, float* residual) {
  if (!holds_nonfinite(batch)) return;  // the whole block
  const Tile tile = batch.tiles[blockIdx.x];
  for (uint32_t i = threadIdx.x; i < tile.num_elements; i += kTileThreads) {
    if (flags_of(read<double>(in + tile.output_offset + 8 * i)) == 0) continue;
    const double value = read<double>(own_payload + tile.payload_offset + 8 * i);
    const double sent = alpha * gradient[tile.gradient_offset + i];
    float* r = residual + tile.residual_offset + i;
    *r = residual_of(static_cast<double>(*r) + (value - sent), *r);
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
                        payload_by_rank, world_size, 1.0 / static_cast<double>(world_size), gain,
                        owner_residual, out);
}

inline void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
                 const void* gradient, float alpha, float* residual) {
  launch<undo_kernel>(batch.num_tiles, kTileThreads, batch.stream, arguments_of<NoOptions>(batch),
                      own_payload, in, static_cast<const double*>(gradient),
                      static_cast<double>(alpha), residual);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact_float64
