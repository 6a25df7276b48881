// The exact codec for fp64 gradients: fp64 arithmetic, fp32 residuals. Plain loops over elements;
// fp64 gradients are too rare for more.
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/common/float_environment.h"
#include "kernels/common/unit_io.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact_float64 {

constexpr uint64_t kInfinity64 = 0x7ff0000000000000u;
constexpr uint64_t kNan64 = 0x7ff8000000000000u;

GRADFERRY_LANE uint64_t magnitude64(double x) {
  uint64_t result;
  __builtin_memcpy(&result, &x, sizeof(result));
  return result & 0x7fffffffffffffffu;
}
GRADFERRY_LANE bool is_finite64(double x) { return magnitude64(x) < kInfinity64; }
GRADFERRY_LANE double load64(const std::byte* p) {
  double result;
  __builtin_memcpy(&result, p, sizeof(result));
  return result;
}
// Returns whether the number written is finite.
GRADFERRY_LANE bool store64(std::byte* p, double x) {
  if (magnitude64(x) > kInfinity64) {
    __builtin_memcpy(p, &kNan64, sizeof(kNan64));
  } else {
    __builtin_memcpy(p, &x, sizeof(x));
  }
  return is_finite64(x);
}
// A residual takes only finite values, in fp32.
GRADFERRY_LANE void set_residual(float* residual, double updated) {
  const float rounded = static_cast<float>(updated);
  if (magnitude_bits(rounded) < kInfinityBits) *residual = rounded;
}
// The residual of v, which is sent exactly: 0, or the old one in units of v if v is not finite.
GRADFERRY_LANE void withhold(float* residual, double v, double gain) {
  set_residual(residual, gain * static_cast<double>(*residual));
  set_residual(residual, v - v);
}

constexpr uint32_t payload_bytes(uint32_t n) { return round_up(8 * n, kPayloadAlignment); }

GRADFERRY_LANE void finish(const TileBatch& batch, uint32_t index, std::byte* payload,
                           bool finite) {
  const Tile& tile = batch.tiles[index];
  const uint32_t num_bytes = payload_bytes(tile.num_elements);
  __builtin_memset(payload + 8 * tile.num_elements, 0, num_bytes - 8 * tile.num_elements);
  if (batch.status == nullptr) return;
  batch.status[index] = {payload_checksum(payload, num_bytes, tile.message_offset),
                         finite ? 0 : kTileNonFinite};
}

// The status of a tile whose gradient was written.
GRADFERRY_LANE void set_flags(const TileBatch& batch, uint32_t index, bool finite) {
  if (batch.status != nullptr) batch.status[index] = {0, finite ? 0 : kTileNonFinite};
}

[[gnu::noinline]] inline void encode_tiles(const TileBatch& batch, const std::byte* gradient,
                                           double alpha, double gain, float* residual,
                                           std::byte* out) {
  for (uint32_t index = 0; index < batch.num_tiles; ++index) {
    const Tile& tile = batch.tiles[index];
    const uint32_t n = tile.num_elements;
    const std::byte* g = gradient + 8 * tile.gradient_offset;
    float* r = residual == nullptr ? nullptr : residual + tile.residual_offset;
    std::byte* payload = out + tile.payload_offset;
    bool finite = true;
    if (batch.hold_zero_tiles && all_zero(g, 8 * n, magnitude_mask(ScalarType::kFloat64))) {
      __builtin_memset(payload, 0, 8 * n);
      rescale_residual(r, n, static_cast<float>(gain));
    } else {
      for (uint32_t i = 0; i < n; ++i) {
        double v = alpha * load64(g + 8 * i);
        if (r != nullptr) v = v + gain * static_cast<double>(r[i]);
        finite &= store64(payload + 8 * i, v);
        if (r != nullptr) withhold(r + i, v, gain);
      }
    }
    finish(batch, index, payload, finite);
  }
}

[[gnu::noinline]] inline void decode_tiles(const TileBatch& batch, const std::byte* in,
                                           std::byte* gradient, double beta, float* residual) {
  for (uint32_t index = 0; index < batch.num_tiles; ++index) {
    const Tile& tile = batch.tiles[index];
    bool finite = true;
    for (uint32_t i = 0; i < tile.num_elements; ++i) {
      const double value = load64(in + tile.payload_offset + 8 * i);
      finite &= is_finite64(value);
      if (gradient == nullptr) continue;
      store64(gradient + 8 * (tile.gradient_offset + i), value);
      if (residual != nullptr && beta != 0.0) {
        float* r = residual + tile.residual_offset + i;
        set_residual(r, static_cast<double>(*r) + beta * value);
      }
    }
    set_flags(batch, index, finite);
  }
}

// In rank order, of the element at an offset in each payload.
GRADFERRY_LANE double sum_ranks(const std::byte* const* payload_by_rank, uint32_t world_size,
                                size_t offset) {
  double sum = load64(payload_by_rank[0] + offset);
  for (uint32_t rank = 1; rank < world_size; ++rank) {
    sum = sum + load64(payload_by_rank[rank] + offset);
  }
  return sum;
}

[[gnu::noinline]] inline void reduce_tiles(const TileBatch& batch,
                                           const std::byte* const* payload_by_rank,
                                           uint32_t world_size, double gain, float* residual,
                                           std::byte* out) {
  const double inverse = 1.0 / static_cast<double>(world_size);
  for (uint32_t index = 0; index < batch.num_tiles; ++index) {
    const Tile& tile = batch.tiles[index];
    const uint32_t n = tile.num_elements;
    std::byte* payload = out + tile.output_offset;
    bool hold = batch.hold_zero_tiles;
    for (uint32_t rank = 0; hold && rank < world_size; ++rank) {
      hold = all_zero(payload_by_rank[rank] + tile.payload_offset, payload_bytes(n), ~uint64_t{0});
    }
    if (hold && residual != nullptr) {
      rescale_residual(residual + tile.residual_offset, n, static_cast<float>(gain));
    }
    bool finite = true;
    for (uint32_t i = 0; i < n; ++i) {
      double v = sum_ranks(payload_by_rank, world_size, tile.payload_offset + 8 * i) * inverse;
      if (residual != nullptr && !hold) {
        float* r = residual + tile.residual_offset + i;
        v = v + gain * static_cast<double>(*r);
        withhold(r, v, gain);
      }
      finite &= store64(payload + 8 * i, v);
    }
    finish(batch, index, payload, finite);
  }
}

[[gnu::noinline]] inline void accumulate_tiles(const TileBatch& batch,
                                               const std::byte* const* payload_by_rank,
                                               uint32_t world_size, uint32_t divisor,
                                               std::byte* gradient) {
  const double inverse = 1.0 / static_cast<double>(divisor);
  for (uint32_t index = 0; index < batch.num_tiles; ++index) {
    const Tile& tile = batch.tiles[index];
    bool finite = true;
    for (uint32_t i = 0; i < tile.num_elements; ++i) {
      const double sum = sum_ranks(payload_by_rank, world_size, tile.payload_offset + 8 * i);
      finite &= store64(gradient + 8 * (tile.gradient_offset + i), sum * inverse);
    }
    set_flags(batch, index, finite);
  }
}

[[gnu::noinline]] inline void undo_tiles(const TileBatch& batch, const std::byte* own_payload,
                                         const std::byte* in, const std::byte* gradient,
                                         double alpha, float* residual) {
  for (uint32_t index = 0; index < batch.num_tiles; ++index) {
    const Tile& tile = batch.tiles[index];
    if (!holds_nonfinite(batch, index)) continue;
    for (uint32_t i = 0; i < tile.num_elements; ++i) {
      if (is_finite64(load64(in + tile.output_offset + 8 * i))) continue;
      const double value = load64(own_payload + tile.payload_offset + 8 * i);
      const double sent = alpha * load64(gradient + 8 * (tile.gradient_offset + i));
      float* r = residual + tile.residual_offset + i;
      set_residual(r, static_cast<double>(*r) + (value - sent));
    }
  }
}

inline void encode(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
                   float* residual, std::byte* out) {
  const FloatEnvironment environment;
  encode_tiles(batch, static_cast<const std::byte*>(gradient), alpha, gain ? *gain : 1.0f, residual,
               out);
}

inline void decode(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
                   float* residual) {
  const FloatEnvironment environment;
  decode_tiles(batch, in, static_cast<std::byte*>(gradient), beta, residual);
}

inline void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank,
                   uint32_t world_size, const float* gain, float* owner_residual, std::byte* out) {
  const FloatEnvironment environment;
  reduce_tiles(batch, payload_by_rank, world_size, gain ? *gain : 1.0f, owner_residual, out);
}

inline void accumulate(const TileBatch& batch, const std::byte* const* payload_by_rank,
                       uint32_t world_size, uint32_t divisor, void* gradient) {
  const FloatEnvironment environment;
  accumulate_tiles(batch, payload_by_rank, world_size, divisor, static_cast<std::byte*>(gradient));
}

inline void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
                 const void* gradient, float alpha, float* residual) {
  const FloatEnvironment environment;
  undo_tiles(batch, own_payload, in, static_cast<const std::byte*>(gradient), alpha, residual);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact_float64
