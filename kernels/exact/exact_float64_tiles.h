// The exact codec for fp64 gradients on CUDA: fp64 arithmetic, fp32 residuals. A block takes a
// tile, whose threads take its elements in turn; fp64 gradients are too rare for more.
// exact_float64.h is the same on CPU.
#pragma once

#include "kernels/cuda/tile_kernels.h"

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

// v to element i of the payload.
GRADFERRY_DEVICE void encode_element(PayloadWriter& out, uint32_t i, double v) {
  const uint64_t item = canonical_bits(v);
  out.words(8 * i, Bytes8{{static_cast<uint32_t>(item), static_cast<uint32_t>(item >> 32)}});
}

// What the last element leaves of the payload.
GRADFERRY_DEVICE void write_padding(PayloadWriter& out, uint32_t n) {
  out.zeros(8 * n, payload_bytes(n));
}

// --- tiles: as in tile_kernels.h -----------------------------------------------------------------

GRADFERRY_DEVICE uint64_t encode_tile(const Tile& tile, bool hold_zero_tiles,
                                      const double* gradient, double alpha, const float* gain,
                                      float* residual, std::byte* out) {
  const uint32_t n = tile.num_elements;
  const double* g = gradient + tile.gradient_offset;
  float* r = residual == nullptr ? nullptr : residual + tile.residual_offset;
  PayloadWriter writer(out + tile.payload_offset, tile.message_offset);
  if (hold_zero_tiles) {
    uint64_t seen = 0;
    for (uint32_t i = threadIdx.x; i < n; i += kTileThreads) seen |= bits64(g[i]) & kMagnitude64;
    if (__syncthreads_or(seen != 0 ? 1 : 0) == 0) {
      write_zero_payload(writer.payload, payload_bytes(n));
      if (r != nullptr) keep_residual(Slice(n), r, gain);
      return 0;
    }
  }
  const double factor = gain == nullptr ? 1.0 : static_cast<double>(*gain);
  for (uint32_t i = threadIdx.x; i < n; i += kTileThreads) {
    double v = alpha * g[i];
    if (r != nullptr) v = v + factor * static_cast<double>(r[i]);
    encode_element(writer, i, v);
    if (r != nullptr) r[i] = residual_of(v - v, kept_residual(r[i], gain));
  }
  write_padding(writer, n);
  return writer.checksum;
}

GRADFERRY_DEVICE void add_residual(float* residual, double x) {
  *residual = residual_of(static_cast<double>(*residual) + x, *residual);
}

// Decodes, and puts back into the residual what was lost, `encoded` being the tile's numbers before
// encode; residual null: neither is done to it.
GRADFERRY_DEVICE uint32_t decode_tile(const Tile& tile, const std::byte* own_payload,
                                      const std::byte* payload, const double* encoded,
                                      double* gradient, double alpha, double beta,
                                      float* residual) {
  uint32_t flags = 0;
  for (uint32_t i = threadIdx.x; i < tile.num_elements; i += kTileThreads) {
    const double value = read<double>(payload + 8 * i);
    const uint32_t element_flags = flags_of(value);
    flags |= element_flags;
    float* r = residual == nullptr ? nullptr : residual + tile.residual_offset + i;
    if (r != nullptr && element_flags != 0) {
      add_residual(r, read<double>(own_payload + 8 * i) - alpha * encoded[i]);
    } else if (r != nullptr && beta != 0.0) {
      add_residual(r, beta * value);
    }
    write(gradient + tile.gradient_offset + i, canonical_bits(value));
  }
  return flags;
}

// In rank order, of the element at an offset in each payload.
template <typename PayloadOf>
GRADFERRY_DEVICE double sum_ranks(PayloadOf payload_of, uint32_t world_size, uint32_t offset) {
  double sum = read<double>(payload_of(0) + offset);
  for (uint32_t rank = 1; rank < world_size; ++rank) {
    sum = sum + read<double>(payload_of(rank) + offset);
  }
  return sum;
}

template <typename PayloadOf>
GRADFERRY_DEVICE uint64_t reduce_tile(const Tile& tile, bool is_zero, PayloadOf payload_of,
                                      uint32_t world_size, const float* gain, float* residual,
                                      std::byte* out) {
  const uint32_t n = tile.num_elements;
  float* r = residual == nullptr ? nullptr : residual + tile.residual_offset;
  PayloadWriter writer(out + tile.output_offset, tile.message_offset);
  if (is_zero) {
    write_zero_payload(writer.payload, payload_bytes(n));
    if (r != nullptr) keep_residual(Slice(n), r, gain);
    return 0;
  }
  const double inverse = 1.0 / static_cast<double>(world_size);
  const double factor = gain == nullptr ? 1.0 : static_cast<double>(*gain);
  for (uint32_t i = threadIdx.x; i < n; i += kTileThreads) {
    double v = sum_ranks(payload_of, world_size, tile.payload_offset + 8 * i) * inverse;
    if (r != nullptr) {
      v = v + factor * static_cast<double>(r[i]);
      r[i] = residual_of(v - v, kept_residual(r[i], gain));
    }
    encode_element(writer, i, v);
  }
  write_padding(writer, n);
  return writer.checksum;
}

// The mean of the ranks' numbers to the gradient. Returns flags.
template <typename PayloadOf>
GRADFERRY_DEVICE uint32_t accumulate_tile(const Tile& tile, PayloadOf payload_of,
                                          uint32_t world_size, double* gradient) {
  const double inverse = 1.0 / static_cast<double>(world_size);
  uint32_t flags = 0;
  for (uint32_t i = threadIdx.x; i < tile.num_elements; i += kTileThreads) {
    const double mean = sum_ranks(payload_of, world_size, tile.payload_offset + 8 * i) * inverse;
    flags |= flags_of(mean);
    write(gradient + tile.gradient_offset + i, canonical_bits(mean));
  }
  return flags;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact_float64
