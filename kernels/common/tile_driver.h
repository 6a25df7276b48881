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
//     Gives the values of elements 0 .. padded of the unit to the sink, densely or sparsely: see
//     sinks.h. NaNs are canonical. Returns kTile* flags.
// and, where that makes it faster,
//   kPrefetches = true: encode calls unit.ahead.prefetch_32(i) while it computes, for i = 0, 32, ..
//     Otherwise that is done while the unit is loaded.
//   template <class Sink> static uint32_t sum(const Unit&, const std::byte* const* payload_by_rank,
//                                             size_t offset, uint32_t num_ranks, float* scratch,
//                                             Sink sink)
//     Calls sink(i, s) with the sums of D(payload_by_rank[r] + offset) in rank order; flags as
//     decode. For one i the last call counts. scratch holds kUnit floats and may be what the sink
//     writes to at i.
//   static bool reduces(const Unit&, uint32_t num_ranks)
//   static uint32_t reduce(const Unit&, const std::byte* const* payload_by_rank,
//                          uint32_t num_ranks, float inverse, float* v, float* sums,
//                          std::byte* payload)
//     Where reduces() says so, in place of summing by vectors and encode: adds the sum over ranks,
//     times inverse, to v, which is the residual (0 without one), zero from num_elements to
//     `padded`; codes it into the owner's payload; v -= D(payload), unless the codec's unit is not
//     finite: then v is what it was. Flags: encode's, and kTileCorrupt. sums holds kUnit floats
//     that are +0, before and after.
//
// A unit is read from memory once: v goes to scratch that stays in the L1 cache (or is the gradient
// itself, where that is the same), from which a codec may read it as often as it likes.
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/common/float_environment.h"
#include "kernels/common/sinks.h"
#include "kernels/common/unit_io.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

struct Unit {
  const TileBatch& batch;
  const Tile& tile;
  Stage stage;            // of the payload at hand
  uint32_t first;         // element of the tile
  uint32_t num_elements;  // 1 .. kUnit
  uint32_t padded;        // num_elements rounded up to kBlock
  Ahead ahead;            // encode, sum: what to prefetch meanwhile
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

inline void set_status(const TileBatch& batch, uint32_t index, uint64_t checksum, uint32_t flags) {
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
    if (gradient == nullptr) {
      inspect_tiles(batch, in);
    } else {
      decode_tiles(batch, in, static_cast<std::byte*>(gradient), beta, residual);
    }
  }
  static void reduce(const TileBatch& batch, const std::byte* const* payload_by_rank,
                     uint32_t world_size, const float* gain, float* owner_residual,
                     std::byte* out) {
    const FloatEnvironment environment;
    reduce_tiles(batch, payload_by_rank, world_size, gain == nullptr ? 1.0f : *gain, owner_residual,
                 out);
  }
  static void accumulate(const TileBatch& batch, const std::byte* const* payload_by_rank,
                         uint32_t world_size, uint32_t divisor, void* gradient) {
    const FloatEnvironment environment;
    accumulate_tiles(batch, payload_by_rank, world_size, divisor,
                     static_cast<std::byte*>(gradient));
  }
  static void undo(const TileBatch& batch, const std::byte* own_payload, const std::byte* in,
                   const void* gradient, float alpha, float* residual) {
    const FloatEnvironment environment;
    undo_tiles(batch, own_payload, in, static_cast<const std::byte*>(gradient), alpha, residual);
  }
  static constexpr CodecFunctions functions() {
    return {&encode, &decode, &reduce, &accumulate, &undo};
  }

 private:
  static constexpr uint32_t kUnit = Codec::kUnit;
  static_assert(Codec::kBlock % kChunk == 0 && kUnit % Codec::kBlock == 0);
  static_assert(kTileElements % kUnit == 0);
  static constexpr bool kCodecPrefetches = requires { Codec::kPrefetches; };
  static constexpr bool kCodecReduces = requires { &Codec::reduce; };
  // Elements: far enough for memory to answer, near enough to stay in the L1 cache, which a reduce
  // shares with the payloads of many ranks.
  static constexpr uint32_t kAhead = kUnit > 2048 ? kUnit : 2048;
  static constexpr uint32_t kReduceAhead = kUnit > 1024 ? kUnit : 1024;
  // Decoded gradients bypass the caches from this many tiles (1 MB of fp32) on: before the
  // optimizer reads them, the rest of the batch would have pushed them out.
  static constexpr uint32_t kStreamingTiles = 64;

  template <typename Body>
  GRADFERRY_LANE static void for_units(const TileBatch& batch, const Tile& tile, Stage stage,
                                       Body body) {
    for (uint32_t first = 0; first < tile.num_elements; first += kUnit) {
      const uint32_t rest = tile.num_elements - first;
      const uint32_t n = rest < kUnit ? rest : kUnit;
      body(Unit{batch, tile, stage, first, n, round_up(n, Codec::kBlock), Ahead{}});
    }
  }

  static void zero_padding(std::byte* payload, uint32_t num_bytes) {
    __builtin_memset(payload + num_bytes - kPayloadAlignment, 0, kPayloadAlignment);
  }

  static float* residual_of(const Tile& tile, float* residual, uint32_t first = 0) {
    return residual == nullptr ? nullptr : residual + tile.residual_offset + first;
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

  // What to prefetch: gradient and residual `distance` elements ahead, in this tile or the next
  // one, and payloads of the next tile. After the last tile nothing, or the current addresses.
  static Ahead find_ahead(const Unit& unit, uint32_t index, uint32_t distance,
                          const std::byte* gradient, uint32_t item, const float* residual) {
    const uint32_t further = unit.first + distance;
    const uint32_t units_end = round_up(unit.tile.num_elements, kUnit);
    const bool same_tile = further < unit.tile.num_elements;
    const bool has_next = index + 1 < unit.batch.num_tiles;
    const Tile& next = unit.batch.tiles[has_next ? index + 1 : index];
    Ahead ahead;
    ahead.payload = uintptr_t{next.payload_offset} - unit.tile.payload_offset;
    ahead.output = uintptr_t{next.output_offset} - unit.tile.output_offset;
    if (!same_tile && (further < units_end || !has_next)) return ahead;
    const Tile& tile = same_tile ? unit.tile : next;
    const uint32_t first = same_tile ? further : further - units_end;
    ahead.gradient_item = item;
    if (gradient != nullptr) {
      ahead.gradient =
          reinterpret_cast<uintptr_t>(gradient) + (tile.gradient_offset + first) * item;
    }
    if (residual != nullptr) {
      ahead.residual =
          reinterpret_cast<uintptr_t>(residual) + (tile.residual_offset + first) * sizeof(float);
    }
    return ahead;
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
        rescale_residual(residual_of(tile, residual), tile.num_elements, gain);
        set_status(batch, index, 0, 0);
        continue;
      }
      zero_padding(payload, num_bytes);
      uint32_t flags = 0;
      for_units(batch, tile, batch.stage, [&](Unit unit) {
        const std::byte* from = g + unit.first * item;
        float* r = residual_of(tile, residual, unit.first);
        unit.ahead = find_ahead(unit, index, kAhead, gradient, item, residual);
        unit.ahead.output = unit.ahead.payload;
        // alpha = 1 leaves an fp32 gradient as it is: no need to copy it to scratch.
        if (kCodecPrefetches && r == nullptr && alpha == 1.0f &&
            batch.dtype == ScalarType::kFloat32 && unit.padded == unit.num_elements) {
          flags |= Codec::encode(unit, reinterpret_cast<const float*>(from), payload, nullptr);
          return;
        }
        load_any<!kCodecPrefetches>(unit, from, alpha, r, gain, v);
        rescale_residual(r, unit.num_elements, gain);
        flags |= encode_unit(unit, v, payload, r);
      });
      set_status(batch, index, payload_checksum(payload, num_bytes, tile.message_offset), flags);
    }
  }

  template <bool kPrefetch>
  GRADFERRY_LANE static void load_any(const Unit& unit, const std::byte* g, float alpha,
                                      const float* r, float gain, float* v) {
    const uint32_t n = unit.num_elements;
    with_dtype(unit.batch.dtype, [&]<ScalarType dtype>() {
      if (r == nullptr) {
        load_unit<dtype, false, kPrefetch>(g, n, alpha, r, gain, unit.ahead, v, unit.padded);
      } else {
        load_unit<dtype, true, kPrefetch>(g, n, alpha, r, gain, unit.ahead, v, unit.padded);
      }
    });
  }

  [[gnu::noinline]] static void decode_tiles(const TileBatch& batch, const std::byte* in,
                                             std::byte* gradient, float beta, float* residual) {
    const uint32_t item = item_bytes(batch.dtype);
    const bool momentum = residual != nullptr && beta != 0.0f;
    const bool streaming = batch.num_tiles >= kStreamingTiles && !momentum;
    alignas(64) float scratch[kUnit];
    for (uint32_t index = 0; index < batch.num_tiles; ++index) {
      const Tile& tile = batch.tiles[index];
      const std::byte* payload = in + tile.payload_offset;
      uint32_t flags = 0;
      for_units(batch, tile, batch.stage, [&](const Unit& unit) {
        std::byte* g = gradient + (tile.gradient_offset + unit.first) * item;
        const bool direct = batch.dtype == ScalarType::kFloat32 && unit.padded == unit.num_elements;
        float* values = direct ? reinterpret_cast<float*>(g) : scratch;
        if (direct && streaming && reinterpret_cast<uintptr_t>(g) % 64 == 0) {
          flags |= Codec::decode(unit, payload, StreamSink{values});
          return;
        }
        flags |= Codec::decode(unit, payload, StoreSink{values});
        if (!direct) {
          const uint32_t stored = with_dtype(batch.dtype, [&]<ScalarType dtype>() {
            return store_unit<dtype>(scratch, unit.num_elements, g);
          });
          // Nor may values reach the residual that are infinite only in the gradient's dtype.
          if (momentum && stored != 0) mark_not_finite(unit, g, scratch);
          flags |= stored;
        }
        if (momentum) {
          const F32 b(beta);
          update_residual(residual + tile.residual_offset + unit.first, unit.num_elements,
                          [&](uint32_t i, F32 old) { return old + b * load(values + i); });
        }
      });
      set_status(batch, index, 0, flags);
    }
    if (streaming) finish_streams();
  }

  // Makes values NaN where the gradient is not finite.
  static void mark_not_finite(const Unit& unit, const std::byte* gradient, float* values) {
    alignas(64) float arrived[kUnit];
    load_any<false>(unit, gradient, 1.0f, nullptr, 1.0f, arrived);
    for (uint32_t i = 0; i < unit.num_elements; ++i) {
      if (magnitude_bits(arrived[i]) >= kInfinityBits) values[i] = from_bits(kNanBits);
    }
  }

  // decode without a gradient: writes only the statuses.
  [[gnu::noinline]] static void inspect_tiles(const TileBatch& batch, const std::byte* in) {
    alignas(64) float values[kUnit];
    alignas(64) std::byte narrowed[kUnit * sizeof(float)];
    for (uint32_t index = 0; index < batch.num_tiles; ++index) {
      const std::byte* payload = in + batch.tiles[index].payload_offset;
      uint32_t flags = 0;
      for_units(batch, batch.tiles[index], batch.stage, [&](const Unit& unit) {
        if (batch.dtype == ScalarType::kFloat32) {
          flags |= Codec::decode(unit, payload, NullSink{});
          return;
        }
        flags |= Codec::decode(unit, payload, StoreSink{values});
        flags |= with_dtype(batch.dtype, [&]<ScalarType dtype>() {
          return store_unit<dtype>(values, unit.num_elements, narrowed);
        });
      });
      set_status(batch, index, 0, flags);
    }
  }

  // Gives the sum of the payloads, in rank order, to a sink. Returns kTileCorrupt or 0.
  template <typename Sink>
  GRADFERRY_LANE static uint32_t sum_ranks(const Unit& unit,
                                           const std::byte* const* payload_by_rank,
                                           uint32_t world_size, float* v, Sink sink) {
    const uint32_t offset = unit.tile.payload_offset;
    uint32_t flags = 0;
    if constexpr (requires { Codec::sum(unit, payload_by_rank, offset, world_size, v, sink); }) {
      flags = Codec::sum(unit, payload_by_rank, offset, world_size, v, sink);
    } else {
      flags = Codec::decode(unit, payload_by_rank[0] + offset, StoreSink{v});
      for (uint32_t rank = 1; rank < world_size; ++rank) {
        flags |= Codec::decode(unit, payload_by_rank[rank] + offset, AddSink{v});
      }
      for (uint32_t i = 0; i < unit.padded; i += kLanes) sink(i, load(v + i));
    }
    return flags & kTileCorrupt;
  }

  // v = (sum of the payloads) * inverse + gain * residual, zeros from num_elements on.
  GRADFERRY_LANE static uint32_t average(const Unit& unit, const std::byte* const* payload_by_rank,
                                         uint32_t world_size, float inverse, const float* residual,
                                         float gain, float* v) {
    const F32 inv(inverse), b(gain);
    if (residual != nullptr && unit.padded == unit.num_elements) {
      return sum_ranks(unit, payload_by_rank, world_size, v,
                       [=](uint32_t i, F32 s) { store(v + i, s * inv + b * load(residual + i)); });
    }
    const uint32_t flags = sum_ranks(unit, payload_by_rank, world_size, v,
                                     [=](uint32_t i, F32 s) { store(v + i, s * inv); });
    for (uint32_t i = 0; residual != nullptr && i < unit.num_elements; ++i) {
      v[i] = v[i] + gain * residual[i];
    }
    for (uint32_t i = unit.num_elements; i < unit.padded; ++i) v[i] = 0.0f;
    return flags;
  }

  // Has the codec reduce the residual in place, or by way of scratch where there is none or its
  // last block is padded.
  GRADFERRY_LANE static uint32_t reduce_unit(const Unit& unit,
                                             const std::byte* const* payload_by_rank,
                                             uint32_t world_size, float inverse, float* residual,
                                             float* sums, std::byte* payload) {
    if (residual != nullptr && unit.padded == unit.num_elements) {
      return Codec::reduce(unit, payload_by_rank, world_size, inverse, residual, sums, payload);
    }
    alignas(64) float v[kUnit] = {};
    const size_t num_bytes = unit.num_elements * sizeof(float);
    if (residual != nullptr) __builtin_memcpy(v, residual, num_bytes);
    const uint32_t flags =
        Codec::reduce(unit, payload_by_rank, world_size, inverse, v, sums, payload);
    if (residual != nullptr) __builtin_memcpy(residual, v, num_bytes);
    return flags;
  }

  [[gnu::noinline]] static void reduce_tiles(const TileBatch& batch,
                                             const std::byte* const* payload_by_rank,
                                             uint32_t world_size, float gain, float* owner_residual,
                                             std::byte* out) {
    const float inverse = 1.0f / static_cast<float>(world_size);
    alignas(64) float v[kUnit];
    alignas(64) float sums[kCodecReduces ? kUnit : 1] = {};
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
        rescale_residual(residual_of(tile, owner_residual), n, gain);
        set_status(batch, index, 0, 0);
        continue;
      }
      zero_padding(payload, num_bytes);
      uint32_t flags = 0;
      for_units(batch, tile, Stage::kWorker, [&](Unit unit) {
        unit.ahead = find_ahead(unit, index, kReduceAhead, nullptr, 0, owner_residual);
        float* r = residual_of(tile, owner_residual, unit.first);
        if constexpr (kCodecReduces) {
          if (gain == 1.0f && Codec::reduces(unit, world_size)) {
            flags |= reduce_unit(unit, payload_by_rank, world_size, inverse, r, sums, payload);
            return;
          }
        }
        flags |= average(unit, payload_by_rank, world_size, inverse, r, gain, v);
        rescale_residual(r, unit.num_elements, gain);
        unit.stage = Stage::kOwner;
        flags |= encode_unit(unit, v, payload, r);
      });
      set_status(batch, index, payload_checksum(payload, num_bytes, tile.message_offset), flags);
    }
  }

  // By way of scratch: what a codec gives to its sink may not be its last word.
  [[gnu::noinline]] static void accumulate_tiles(const TileBatch& batch,
                                                 const std::byte* const* payload_by_rank,
                                                 uint32_t world_size, uint32_t divisor,
                                                 std::byte* gradient) {
    const float inverse = 1.0f / static_cast<float>(divisor);
    const uint32_t item = item_bytes(batch.dtype);
    alignas(64) float v[kUnit];
    for (uint32_t index = 0; index < batch.num_tiles; ++index) {
      const Tile& tile = batch.tiles[index];
      std::byte* g = gradient + tile.gradient_offset * item;
      uint32_t flags = 0;
      for_units(batch, tile, Stage::kWorker, [&](Unit unit) {
        unit.ahead = find_ahead(unit, index, kReduceAhead, nullptr, 0, nullptr);
        flags |= average(unit, payload_by_rank, world_size, inverse, nullptr, 1.0f, v);
        flags |= with_dtype(batch.dtype, [&]<ScalarType dtype>() {
          return store_unit<dtype>(v, unit.num_elements, g + unit.first * item);
        });
      });
      set_status(batch, index, 0, flags);
    }
  }

  // Whether the unit's gradients will be finite once `in` is decoded.
  static void find_finite(Unit unit, const std::byte* in, bool* finite) {
    alignas(64) float arrived[kUnit];
    alignas(64) std::byte narrowed[kUnit * sizeof(float)];
    unit.stage = Stage::kOwner;
    Codec::decode(unit, in + unit.tile.output_offset, StoreSink{arrived});
    with_dtype(unit.batch.dtype, [&]<ScalarType dtype>() {
      return store_unit<dtype>(arrived, unit.num_elements, narrowed);
    });
    load_any<false>(unit, narrowed, 1.0f, nullptr, 1.0f, arrived);
    for (uint32_t i = 0; i < unit.num_elements; ++i) {
      finite[i] = magnitude_bits(arrived[i]) < kInfinityBits;
    }
  }

  [[gnu::noinline]] static void undo_tiles(const TileBatch& batch, const std::byte* own_payload,
                                           const std::byte* in, const std::byte* gradient,
                                           float alpha, float* residual) {
    const uint32_t item = item_bytes(batch.dtype);
    alignas(64) float decoded[kUnit];
    alignas(64) float sent[kUnit];
    bool finite[kUnit];
    for (uint32_t index = 0; index < batch.num_tiles; ++index) {
      const Tile& tile = batch.tiles[index];
      if (!holds_nonfinite(batch, index)) continue;
      for_units(batch, tile, batch.stage, [&](const Unit& unit) {
        const std::byte* g = gradient + (tile.gradient_offset + unit.first) * item;
        find_finite(unit, in, finite);
        Codec::decode(unit, own_payload + tile.payload_offset, StoreSink{decoded});
        load_any<false>(unit, g, alpha, nullptr, 1.0f, sent);
        // Non-finite values do not update a residual.
        for (uint32_t i = 0; i < unit.num_elements; ++i) {
          if (finite[i]) sent[i] = from_bits(kNanBits);
        }
        update_residual(
            residual + tile.residual_offset + unit.first, unit.num_elements,
            [&](uint32_t i, F32 old) { return old + (load(decoded + i) - load(sent + i)); });
      });
    }
  }
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
