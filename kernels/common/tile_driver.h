// The walk over a batch of tiles that every CPU codec shares: units, prefetching, ragged ends, zero
// tiles, statuses, floating-point modes. A codec supplies a class with
//
//   kUnit   elements per call, at most kTileElements: one or several of the codec's own units
//   kBlock  v and residual are padded to a multiple of this, itself a multiple of kChunk
//   static uint32_t payload_bytes(n, dtype, stage, options)
//   static uint32_t encode(const Unit&, const float* v, std::byte* payload, float* residual)
//     Codes v into its part of the tile's payload; residual = v - D(p) unless residual is null or
//     the codec's unit is not finite. v is zero from num_elements to `padded`; both are 64-byte
//     aligned except residual. Returns kTileNonFinite or 0. The payload's last 16 bytes are zero
//     before the first unit; the codec writes every other byte.
//   template <class Sink> static uint32_t decode(const Unit&, const std::byte* payload, Sink sink)
//     Calls sink(i, x) with the values of elements i .. i + kLanes - 1 of the unit, for every
//     vector of 0 .. padded. NaNs are canonical. Returns kTile* flags.
//
// A unit is read from memory once: v goes to scratch that stays in the L1 cache, from which a codec
// may read it as often as it likes. While a unit is loaded, the next one is prefetched.
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/common/float_environment.h"
#include "kernels/common/unit_io.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

struct Unit {
  const TileBatch& batch;
  const Tile& tile;
  Stage stage;            // of the payload at hand
  uint32_t first;         // element of the tile
  uint32_t num_elements;  // 1 .. kUnit
  uint32_t padded;        // num_elements rounded up to kBlock
};

struct StoreSink {
  float* out;
  GRADFERRY_LANE void operator()(uint32_t i, F32 x) const { store(out + i, x); }
};
struct AddSink {
  float* out;
  GRADFERRY_LANE void operator()(uint32_t i, F32 x) const { store(out + i, load(out + i) + x); }
};

// Calls f with the dtype as a compile-time constant. Codecs never see kFloat64 here: `exact` has
// its own walk for it.
template <typename F>
GRADFERRY_LANE auto with_dtype(ScalarType dtype, F f) {
  switch (dtype) {
    case ScalarType::kBFloat16: return f.template operator()<ScalarType::kBFloat16>();
    case ScalarType::kFloat16: return f.template operator()<ScalarType::kFloat16>();
    default: return f.template operator()<ScalarType::kFloat32>();
  }
}

inline void set_status(const TileBatch& batch, uint32_t index, uint32_t checksum, uint32_t flags) {
  if (batch.status != nullptr) batch.status[index] = {checksum, flags};
}

template <typename Codec>
class TileDriver {
 public:
  static void encode(const TileBatch& batch, const void* gradient, float alpha, const float* gain,
                     float* residual, std::byte* out) {
    const FloatEnvironment environment;
    encode_tiles(batch, static_cast<const std::byte*>(gradient), alpha,
                 gain == nullptr ? 1.0f : *gain, residual, out);
  }
  static void decode(const TileBatch& batch, const std::byte* in, void* gradient, float beta,
                     float* residual) {
    const FloatEnvironment environment;
    decode_tiles(batch, in, static_cast<std::byte*>(gradient), beta, residual);
  }
  static void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank,
                     uint32_t world_size, const float* gain, float* owner_residual,
                     std::byte* out) {
    const FloatEnvironment environment;
    reduce_tiles(batch, payload_by_rank, world_size, gain == nullptr ? 1.0f : *gain, owner_residual,
                 out);
  }
  static void undo(const TileBatch& batch, const std::byte* own_payload, const void* gradient,
                   float alpha, float* residual) {
    const FloatEnvironment environment;
    undo_tiles(batch, own_payload, static_cast<const std::byte*>(gradient), alpha, residual);
  }
  static constexpr CodecFunctions functions() { return {&encode, &decode, &reduce, &undo}; }

 private:
  static constexpr uint32_t kUnit = Codec::kUnit;
  static_assert(Codec::kBlock % kChunk == 0 && kUnit % Codec::kBlock == 0);
  static_assert(kUnit == kTileElements || kTileElements % kUnit == 0);

  template <typename Body>
  GRADFERRY_LANE static void for_units(const TileBatch& batch, const Tile& tile, Stage stage,
                                       Body body) {
    for (uint32_t first = 0; first < tile.num_elements; first += kUnit) {
      const uint32_t rest = tile.num_elements - first;
      const uint32_t n = rest < kUnit ? rest : kUnit;
      body(Unit{batch, tile, stage, first, n, round_up(n, Codec::kBlock)});
    }
  }

  static void zero_padding(std::byte* payload, uint32_t num_bytes) {
    __builtin_memset(payload + num_bytes - kPayloadAlignment, 0, kPayloadAlignment);
  }

  // Has the codec write the residual in place, or by way of scratch where its last block is padded.
  GRADFERRY_LANE static uint32_t encode_unit(const Unit& unit, const float* v, std::byte* payload,
                                             float* residual) {
    if (residual == nullptr || unit.padded == unit.num_elements) {
      return Codec::encode(unit, v, payload, residual);
    }
    alignas(64) float scratch[kUnit];
    const size_t num_bytes = unit.num_elements * sizeof(float);
    __builtin_memcpy(scratch, residual, num_bytes);
    for (uint32_t i = unit.num_elements; i < unit.padded; ++i) scratch[i] = 0.0f;
    const uint32_t flags = Codec::encode(unit, v, payload, scratch);
    __builtin_memcpy(residual, scratch, num_bytes);
    return flags;
  }

  // The unit after `unit` in the same tile, else the first of the next tile, else this one.
  static const Tile& ahead(const Unit& unit, uint32_t index, uint32_t* first) {
    if (unit.first + kUnit < unit.tile.num_elements) {
      *first = unit.first + kUnit;
      return unit.tile;
    }
    *first = 0;
    return unit.batch.tiles[index + 1 < unit.batch.num_tiles ? index + 1 : index];
  }

  [[gnu::noinline]] static void encode_tiles(const TileBatch& batch, const std::byte* gradient,
                                             float alpha, float gain, float* residual,
                                             std::byte* out) {
    const uint32_t item = item_bytes(batch.dtype);
    alignas(64) float v[kUnit];
    for (uint32_t index = 0; index < batch.num_tiles; ++index) {
      const Tile& tile = batch.tiles[index];
      const uint32_t num_bytes =
          Codec::payload_bytes(tile.num_elements, batch.dtype, batch.stage, *batch.options);
      const std::byte* g = gradient + tile.gradient_offset * item;
      std::byte* payload = out + tile.payload_offset;
      if (batch.hold_zero_tiles &&
          all_zero(g, tile.num_elements * item, magnitude_mask(batch.dtype))) {
        __builtin_memset(payload, 0, num_bytes);
        set_status(batch, index, 0, 0);
        continue;
      }
      zero_padding(payload, num_bytes);
      uint32_t flags = 0;
      for_units(batch, tile, batch.stage, [&](const Unit& unit) {
        uint32_t next_first;
        const Tile& next = ahead(unit, index, &next_first);
        float* r = residual == nullptr ? nullptr : residual + tile.residual_offset + unit.first;
        const Ahead prefetched{gradient + (next.gradient_offset + next_first) * item,
                               reinterpret_cast<const std::byte*>(residual) +
                                   (next.residual_offset + next_first) * sizeof(float)};
        load_any(unit, g + unit.first * item, alpha, r, gain, prefetched, v);
        flags |= encode_unit(unit, v, payload, r);
      });
      set_status(batch, index, payload_checksum(payload, num_bytes), flags);
    }
  }

  GRADFERRY_LANE static void load_any(const Unit& unit, const std::byte* g, float alpha,
                                      const float* r, float gain, Ahead prefetched, float* v) {
    with_dtype(unit.batch.dtype, [&]<ScalarType dtype>() {
      if (r == nullptr) {
        load_unit<dtype, false>(g, unit.num_elements, alpha, r, gain, prefetched, v, unit.padded);
      } else {
        load_unit<dtype, true>(g, unit.num_elements, alpha, r, gain, prefetched, v, unit.padded);
      }
    });
  }

  [[gnu::noinline]] static void decode_tiles(const TileBatch& batch, const std::byte* in,
                                             std::byte* gradient, float beta, float* residual) {
    const uint32_t item = item_bytes(batch.dtype);
    alignas(64) float scratch[kUnit];
    for (uint32_t index = 0; index < batch.num_tiles; ++index) {
      const Tile& tile = batch.tiles[index];
      uint32_t flags = 0;
      for_units(batch, tile, batch.stage, [&](const Unit& unit) {
        std::byte* g = gradient + (tile.gradient_offset + unit.first) * item;
        const bool direct = batch.dtype == ScalarType::kFloat32 && unit.padded == unit.num_elements;
        float* values = direct ? reinterpret_cast<float*>(g) : scratch;
        flags |= Codec::decode(unit, in + tile.payload_offset, StoreSink{values});
        if (!direct) {
          flags |= with_dtype(batch.dtype, [&]<ScalarType dtype>() {
            return store_unit<dtype>(scratch, unit.num_elements, g);
          });
        }
        if (residual != nullptr && beta != 0.0f) {
          const F32 b(beta);
          update_residual(residual + tile.residual_offset + unit.first, unit.num_elements,
                          [&](uint32_t i, F32 old) { return old + b * load(values + i); });
        }
      });
      set_status(batch, index, 0, flags);
    }
  }

  // v = (sum of the payloads, in rank order) * inverse.
  GRADFERRY_LANE static uint32_t sum_ranks(const Unit& unit,
                                           const std::byte* const* payload_by_rank,
                                           uint32_t world_size, float* v) {
    const uint32_t offset = unit.tile.payload_offset;
    uint32_t flags = Codec::decode(unit, payload_by_rank[0] + offset, StoreSink{v});
    for (uint32_t rank = 1; rank < world_size; ++rank) {
      flags |= Codec::decode(unit, payload_by_rank[rank] + offset, AddSink{v});
    }
    return flags & kTileCorrupt;
  }

  // v = v * inverse + gain * residual, zeros from num_elements on.
  GRADFERRY_LANE static void average(const Unit& unit, float inverse, const float* residual,
                                     float gain, float* v) {
    const F32 inv(inverse), b(gain);
    for (uint32_t i = 0; i < unit.padded; i += kLanes) store(v + i, load(v + i) * inv);
    for (uint32_t i = unit.num_elements; i < unit.padded; ++i) v[i] = 0.0f;
    if (residual == nullptr) return;
    uint32_t i = 0;
    for (; i + kLanes <= unit.num_elements; i += kLanes) {
      store(v + i, load(v + i) + b * load(residual + i));
    }
    for (; i < unit.num_elements; ++i) v[i] = v[i] + gain * residual[i];
  }

  [[gnu::noinline]] static void reduce_tiles(const TileBatch& batch,
                                             const std::byte* const* payload_by_rank,
                                             uint32_t world_size, float gain, float* owner_residual,
                                             std::byte* out) {
    const float inverse = 1.0f / static_cast<float>(world_size);
    alignas(64) float v[kUnit];
    for (uint32_t index = 0; index < batch.num_tiles; ++index) {
      const Tile& tile = batch.tiles[index];
      const uint32_t n = tile.num_elements;
      const uint32_t in_bytes =
          Codec::payload_bytes(n, batch.dtype, Stage::kWorker, *batch.options);
      const uint32_t num_bytes =
          Codec::payload_bytes(n, batch.dtype, Stage::kOwner, *batch.options);
      std::byte* payload = out + tile.output_offset;
      bool hold = batch.hold_zero_tiles;
      for (uint32_t rank = 0; hold && rank < world_size; ++rank) {
        hold = all_zero(payload_by_rank[rank] + tile.payload_offset, in_bytes, ~uint64_t{0});
      }
      if (hold) {
        __builtin_memset(payload, 0, num_bytes);
        set_status(batch, index, 0, 0);
        continue;
      }
      zero_padding(payload, num_bytes);
      uint32_t flags = 0;
      for_units(batch, tile, Stage::kWorker, [&](const Unit& unit) {
        float* r = owner_residual == nullptr ? nullptr
                                             : owner_residual + tile.residual_offset + unit.first;
        flags |= sum_ranks(unit, payload_by_rank, world_size, v);
        average(unit, inverse, r, gain, v);
        Unit written = unit;
        written.stage = Stage::kOwner;
        flags |= encode_unit(written, v, payload, r);
      });
      set_status(batch, index, payload_checksum(payload, num_bytes), flags);
    }
  }

  [[gnu::noinline]] static void undo_tiles(const TileBatch& batch, const std::byte* own_payload,
                                           const std::byte* gradient, float alpha,
                                           float* residual) {
    const uint32_t item = item_bytes(batch.dtype);
    alignas(64) float decoded[kUnit];
    alignas(64) float sent[kUnit];
    for (uint32_t index = 0; index < batch.num_tiles; ++index) {
      const Tile& tile = batch.tiles[index];
      uint32_t flags = 0;
      for_units(batch, tile, batch.stage, [&](const Unit& unit) {
        const std::byte* g = gradient + (tile.gradient_offset + unit.first) * item;
        flags |= Codec::decode(unit, own_payload + tile.payload_offset, StoreSink{decoded});
        load_any(unit, g, alpha, nullptr, 1.0f, Ahead{g, nullptr}, sent);
        update_residual(
            residual + tile.residual_offset + unit.first, unit.num_elements,
            [&](uint32_t i, F32 old) { return old + (load(decoded + i) - load(sent + i)); });
      });
      set_status(batch, index, 0, flags);
    }
  }
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
