// The kernels that every CUDA codec shares: one thread block of 128 threads per tile (slice.h says
// which thread has which elements), one launch per codec and batch. They do what
// kernels/common/tile_driver.h does on CPU, to the bit: gradients and residuals in and out, the sum
// over ranks, zero tiles, statuses, checksums. A codec supplies a class with
//
//   Options             trivially copyable: what CodecOptions holds
//   kUnitsAreQuads      a quad's elements share a unit, and a residual of a finite unit is finite
//   kUsesDtype          payloads depend on the gradient's dtype
//   kMinBlocks          for __launch_bounds__: 0 leaves registers to the compiler, 1 lets it take
//                       what keeps everything out of local memory
//   static uint32_t payload_bytes(n, dtype, stage, options)
//   template <ScalarType dtype, bool kKeep>
//   static uint32_t encode(const TileUnit<Options>&, float* v, PayloadWriter& out)
//     Writes the payload of v, all of its bytes, and replaces v by v - D(p): by NaN in units that
//     are not finite, by anything if kKeep is false. Returns kTileNonFinite or 0. v is +0 beyond
//     the tile's end.
//   template <ScalarType dtype, typename Sink>
//   static uint32_t decode(const TileUnit<Options>&, const std::byte* payload, Sink sink)
//     Calls sink(j, value) for all kLaneElements elements of the lane, in order; anything beyond
//     the tile's end. NaNs are canonical. Returns kTile* flags.
// encode and decode are called by whole blocks: they may use barriers and shared memory.
//
// What limits these kernels is memory: with error feedback 12 bytes per fp32 element and the
// payload. Each element is read once and written once; where a unit turns out not to be finite its
// residual is read again.
#pragma once

#include "kernels/common/block_collectives.h"
#include "kernels/common/codec_parts.h"
#include "kernels/common/payload_writer.h"
#include "kernels/common/slice.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// A TileBatch as kernels get it, by value.
template <typename Options>
struct BatchArguments {
  const Tile* tiles;
  TileStatus* status;
  uint64_t seed;
  uint64_t step;
  Options options;
  Stage stage;
  bool hold_zero_tiles;
};

template <typename Options>
struct TileUnit {
  Slice slice;
  Stage stage;
  ScalarType dtype;
  uint32_t payload_bytes;
  uint64_t tile_id;
  uint64_t seed;
  uint64_t step;
  Options options;
};

struct NoOptions {};

// --- device helpers ------------------------------------------------------------------------------

// A residual that is kept is converted to the present loss scale, where that leaves it finite.
GRADFERRY_DEVICE float kept_residual(float old, const float* gain) {
  if (gain == nullptr) return old;
  const float converted = *gain * old;
  return is_not_finite(converted) ? old : converted;
}

GRADFERRY_DEVICE void keep_residual(const Slice& slice, float* residual, const float* gain) {
  if (gain == nullptr || *gain == 1.0f) return;
  for (uint32_t i = threadIdx.x; i < slice.num_elements; i += kTileThreads) {
    residual[i] = kept_residual(residual[i], gain);
  }
}

// residual = updated where that is finite, else the old value, converted to the current loss scale.
// Kept values are read again, in a loop that costs nothing if there are none.
template <bool kByQuads>
GRADFERRY_DEVICE void store_residual(const Slice& slice, const float* updated, const float* gain,
                                     float* residual) {
  auto* array = reinterpret_cast<std::byte*>(residual);
  const bool by_quads = goes_by_quads(slice, residual);
  uint32_t kept = 0;  // bit j: element j of the lane
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    const float* x = updated + kQuad * row;
    const uint32_t element = slice.element(row);
    const bool is_finite =
        kByQuads ? !is_not_finite(x[0]) : quad_arrives_finite<ScalarType::kFloat32>(x);
    if (by_quads && is_finite) {
      write(array + element * sizeof(float), narrow_quad<ScalarType::kFloat32>(x, true));
      continue;
    }
    rare_path();
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) {
      if (is_not_finite(x[kByQuads ? 0 : i])) {
        kept |= 1u << (kQuad * row + i);
      } else if (element + i < slice.num_elements) {
        residual[element + i] = x[i];
      }
    }
  }
  for (; kept != 0; kept &= kept - 1) {
    rare_path();
    const uint32_t j = static_cast<uint32_t>(__ffs(static_cast<int>(kept))) - 1;
    const uint32_t element = slice.element(j / kQuad) + j % kQuad;
    if (element < slice.num_elements) residual[element] = kept_residual(residual[element], gain);
  }
}

template <typename Options>
GRADFERRY_DEVICE void set_status(const BatchArguments<Options>& batch, TileStatus status) {
  if (threadIdx.x == 0 && batch.status != nullptr) batch.status[blockIdx.x] = status;
}

// Whether undo must process the block's tile.
template <typename Options>
GRADFERRY_DEVICE bool holds_nonfinite(const BatchArguments<Options>& batch) {
  return batch.status == nullptr || (batch.status[blockIdx.x].flags & kTileNonFinite) != 0;
}

// The last thing a kernel does.
template <typename Options>
GRADFERRY_DEVICE void finish(const BatchArguments<Options>& batch, StatusPart part) {
  GRADFERRY_SHARED(StatusStorage<kTileThreads>, storage);
  const StatusPart all = combine_status<kTileThreads>(storage, part);
  set_status(batch, {all.checksum, all.flags});
}

// Whether one of the lane's elements is neither +0 nor -0.
GRADFERRY_DEVICE bool has_magnitude(const float* x) {
  uint32_t seen = 0;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) seen |= bits(x[j]);
  return (seen & kMagnitudeBits) != 0;
}

GRADFERRY_DEVICE void write_zero_payload(std::byte* payload, uint32_t num_bytes) {
  for (uint32_t i = 16 * threadIdx.x; i < num_bytes; i += 16 * kTileThreads) {
    write(payload + i, Bytes16{});
  }
}

// Prefetches the payloads, which are decoded one after the other and would each wait for memory.
GRADFERRY_DEVICE void prefetch_payloads(const std::byte* const* payload_by_rank,
                                        uint32_t world_size, uint32_t offset, uint32_t num_bytes) {
  constexpr uint32_t kLine = 128;
  const uint32_t lines = (num_bytes + kLine - 1) / kLine;
  for (uint32_t i = threadIdx.x; i < world_size * lines; i += kTileThreads) {
    prefetch(payload_by_rank[i / lines] + offset + i % lines * kLine);
  }
}

// Whether the payloads of all ranks are zero bytes. Ends at the first that is not: after one pass
// over one payload, usually.
GRADFERRY_DEVICE bool all_payloads_are_zero(const std::byte* const* payload_by_rank,
                                            uint32_t world_size, uint32_t offset,
                                            uint32_t num_bytes) {
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    const std::byte* payload = payload_by_rank[rank] + offset;
    uint32_t seen = 0;
    for (uint32_t i = 16 * threadIdx.x; i < num_bytes; i += 16 * kTileThreads) {
      const Bytes16 words = read<Bytes16>(payload + i);
      seen |= words.word[0] | words.word[1] | words.word[2] | words.word[3];
    }
    if (__syncthreads_or(seen != 0 ? 1 : 0) != 0) return false;
  }
  return true;
}

template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE TileUnit<typename Codec::Options> make_unit(
    const Tile& tile, Stage stage, uint64_t seed, uint64_t step,
    const typename Codec::Options& options) {
  return {Slice(tile.num_elements),
          stage,
          dtype,
          Codec::payload_bytes(tile.num_elements, dtype, stage, options),
          tile.id,
          seed,
          step,
          options};
}
template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE TileUnit<typename Codec::Options> make_unit(
    const BatchArguments<typename Codec::Options>& batch, const Tile& tile, Stage stage) {
  return make_unit<Codec, dtype>(tile, stage, batch.seed, batch.step, batch.options);
}

// --- tiles ---------------------------------------------------------------------------------------
//
// What a block does with its tile, for the kernels below and for those of chunks. Pointers are to
// the start of whole arrays, as in codec.h; a residual may be null. The lane's values are one array
// for all branches: with an array per branch, the compiler merges what branches have in common, and
// arrays go to local memory.

// Returns the thread's part of the tile's status.
template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE StatusPart encode_tile(const TileUnit<typename Codec::Options>& unit,
                                        const Tile& tile, bool hold_zero_tiles,
                                        const std::byte* gradient, float alpha, const float* gain,
                                        float* residual, std::byte* out) {
  const Slice& slice = unit.slice;
  std::byte* payload = out + tile.payload_offset;
  float* tile_residual = residual == nullptr ? nullptr : residual + tile.residual_offset;

  float v[kLaneElements], old[kLaneElements];
  load_slice<dtype>(slice, gradient + tile.gradient_offset * item_bytes(dtype), v);
  if (residual != nullptr) {
    load_residual(slice, tile_residual, old);
  }
  if (hold_zero_tiles && __syncthreads_or(has_magnitude(v) ? 1 : 0) == 0) {
    rare_path();
    write_zero_payload(payload, unit.payload_bytes);
    if (residual != nullptr) keep_residual(slice, tile_residual, gain);
    return {0, 0};
  }
  if (residual != nullptr) {
    const float g = gain == nullptr ? 1.0f : *gain;
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = alpha * v[j] + g * old[j];
  } else {
    GRADFERRY_UNROLL
    for (float& x : v) x = alpha * x;
  }

  PayloadWriter writer(payload, tile.message_offset);
  uint32_t flags = 0;
  if (residual != nullptr) {
    flags = Codec::template encode<dtype, true>(unit, v, writer);
    store_residual<Codec::kUnitsAreQuads>(slice, v, gain, tile_residual);
  } else {
    flags = Codec::template encode<dtype, false>(unit, v, writer);
  }
  return {writer.checksum, flags};
}

// v = the lane's values, +0 beyond the tile's end. Returns flags.
template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE uint32_t decode_values(const TileUnit<typename Codec::Options>& unit,
                                        const std::byte* payload, float* v) {
  const uint32_t flags =
      Codec::template decode<dtype>(unit, payload, [&](uint32_t j, float x) { v[j] = x; });
  clear_beyond_end(unit.slice, v);
  return flags;
}

// Adds to an element of a residual, if the sum is finite.
GRADFERRY_DEVICE void add_finite(float* residual, float x) {
  const float sum = *residual + x;
  if (!is_not_finite(sum)) *residual = sum;
}

// residual += beta * v, but for elements that do not arrive finite in the gradient, and sums that
// are not. Row by row: the old values of all rows would not fit into registers beside v.
template <ScalarType dtype>
GRADFERRY_DEVICE void add_arrived(const Slice& slice, const float* v, float beta, float* residual) {
  constexpr ScalarType kFloat = ScalarType::kFloat32;
  const bool by_quads = goes_by_quads(slice, residual);
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    const float* x = v + kQuad * row;
    const uint32_t element = slice.element(row);
    if (by_quads) {
      auto* array = reinterpret_cast<std::byte*>(residual + element);
      float kept[kQuad];
      widen_quad<kFloat>(read<Quad<kFloat>>(array), kept);
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        if (arrives_finite<dtype>(x[i])) add_finite(kept + i, beta * x[i]);
      }
      write(array, narrow_quad<kFloat>(kept, true));
      continue;
    }
    rare_path();
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) {
      if (element + i >= slice.num_elements || !arrives_finite<dtype>(x[i])) continue;
      add_finite(residual + element + i, beta * x[i]);
    }
  }
}

// Writes what decode_values() gave, unless `gradient` is null. Returns
// flags: a finite number may be infinite in the gradient's dtype.
template <ScalarType dtype>
GRADFERRY_DEVICE uint32_t store_values(const Slice& slice, const Tile& tile, const float* v,
                                       std::byte* gradient, float beta, float* residual) {
  bool all_finite = false;
  if (gradient == nullptr) {
    rare_path();
    all_finite = slice_arrives_finite<dtype>(v);
  } else {
    all_finite = store_slice<dtype>(slice, gradient + tile.gradient_offset * item_bytes(dtype), v);
  }
  if (gradient != nullptr && residual != nullptr && beta != 0.0f) {
    rare_path();
    add_arrived<dtype>(slice, v, beta, residual + tile.residual_offset);
  }
  // What fp32 does not hold has its flag already.
  return dtype == ScalarType::kFloat32 || all_finite ? 0 : kTileNonFinite;
}

// v = the sum of the ranks' values in rank order, anything beyond the tile's end. payload_of(rank):
// where the rank's payloads begin. Returns kTileCorrupt or 0.
template <typename Codec, ScalarType dtype, typename PayloadOf>
GRADFERRY_DEVICE uint32_t sum_ranks(const TileUnit<typename Codec::Options>& unit, const Tile& tile,
                                    PayloadOf payload_of, uint32_t world_size, float* v) {
  // Adding -0 changes no number, so the first rank's values do not change.
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = -0.0f;
  uint32_t flags = 0;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    flags |= Codec::template decode<dtype>(unit, payload_of(rank) + tile.payload_offset,
                                           [&](uint32_t j, float x) { v[j] = v[j] + x; });
  }
  return flags & kTileCorrupt;
}

// `is_zero`: this tile's payloads are held zero tiles. Returns the thread's part of the tile's
// status.
template <typename Codec, ScalarType dtype, typename PayloadOf>
GRADFERRY_DEVICE StatusPart reduce_tile(const TileUnit<typename Codec::Options>& unit,
                                        const TileUnit<typename Codec::Options>& owner_unit,
                                        const Tile& tile, bool is_zero, PayloadOf payload_of,
                                        uint32_t world_size, const float* gain,
                                        float* owner_residual, std::byte* out) {
  const Slice& slice = unit.slice;
  std::byte* payload = out + tile.output_offset;
  float* tile_residual =
      owner_residual == nullptr ? nullptr : owner_residual + tile.residual_offset;
  if (is_zero) {
    rare_path();
    write_zero_payload(payload, owner_unit.payload_bytes);
    if (owner_residual != nullptr) keep_residual(slice, tile_residual, gain);
    return {0, 0};
  }

  float v[kLaneElements];
  uint32_t flags = sum_ranks<Codec, dtype>(unit, tile, payload_of, world_size, v);
  const float inverse = 1.0f / static_cast<float>(world_size);
  if (owner_residual != nullptr) {
    float old[kLaneElements];
    load_residual(slice, tile_residual, old);
    const float g = gain == nullptr ? 1.0f : *gain;
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = v[j] * inverse + g * old[j];
  } else {
    GRADFERRY_UNROLL
    for (float& x : v) x = x * inverse;
  }
  clear_beyond_end(slice, v);

  PayloadWriter writer(payload, tile.message_offset);
  if (owner_residual != nullptr) {
    flags |= Codec::template encode<dtype, true>(owner_unit, v, writer);
    store_residual<Codec::kUnitsAreQuads>(slice, v, gain, tile_residual);
  } else {
    flags |= Codec::template encode<dtype, false>(owner_unit, v, writer);
  }
  return {writer.checksum, flags};
}

// `payload`: what arrived; own_payload: what this rank sent.
template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE void undo_tile(const TileUnit<typename Codec::Options>& unit,
                                const TileUnit<typename Codec::Options>& owner_unit,
                                const Tile& tile, const std::byte* own_payload,
                                const std::byte* payload, const std::byte* gradient, float alpha,
                                float* residual) {
  const Slice& slice = unit.slice;
  float* tile_residual = residual + tile.residual_offset;
  static_assert(kLaneElements == 32);
  uint32_t lost = 0;  // bit j: element j of the lane
  Codec::template decode<dtype>(owner_unit, payload, [&](uint32_t j, float x) {
    lost |= (arrives_finite<dtype>(x) ? 0u : 1u) << j;
  });
  float v[kLaneElements], x[kLaneElements];
  Codec::template decode<dtype>(unit, own_payload, [&](uint32_t j, float d) { v[j] = d; });
  load_slice<dtype>(slice, gradient + tile.gradient_offset * item_bytes(dtype), x);
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = v[j] - alpha * x[j];
  load_residual(slice, tile_residual, x);
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = (lost >> j & 1) != 0 ? x[j] + v[j] : x[j];
  store_residual<false>(slice, v, nullptr, tile_residual);
}

// --- kernels -------------------------------------------------------------------------------------

template <typename Codec, ScalarType dtype, bool kResidual>
__global__ void __launch_bounds__(kTileThreads, Codec::kMinBlocks)
    encode_kernel(BatchArguments<typename Codec::Options> batch, const std::byte* gradient,
                  float alpha, const float* gain, float* residual, std::byte* out) {
  if (kResidual != (residual != nullptr)) __builtin_unreachable();
  const Tile tile = batch.tiles[blockIdx.x];
  const auto unit = make_unit<Codec, dtype>(batch, tile, batch.stage);
  finish(batch, encode_tile<Codec, dtype>(unit, tile, batch.hold_zero_tiles, gradient, alpha, gain,
                                          residual, out));
}

template <typename Codec, ScalarType dtype>
__global__ void __launch_bounds__(kTileThreads, Codec::kMinBlocks)
    decode_kernel(BatchArguments<typename Codec::Options> batch, const std::byte* in,
                  std::byte* gradient, float beta, float* residual) {
  const Tile tile = batch.tiles[blockIdx.x];
  const auto unit = make_unit<Codec, dtype>(batch, tile, batch.stage);
  float v[kLaneElements];
  uint32_t flags = decode_values<Codec, dtype>(unit, in + tile.payload_offset, v);
  flags |= store_values<dtype>(unit.slice, tile, v, gradient, beta, residual);
  finish(batch, {0, flags});
}

template <typename Codec, ScalarType dtype, bool kResidual>
__global__ void __launch_bounds__(kTileThreads, Codec::kMinBlocks)
    reduce_kernel(BatchArguments<typename Codec::Options> batch,
                  const std::byte* const* payload_by_rank, uint32_t world_size, const float* gain,
                  float* owner_residual, std::byte* out) {
  if (kResidual != (owner_residual != nullptr)) __builtin_unreachable();
  const Tile tile = batch.tiles[blockIdx.x];
  const auto unit = make_unit<Codec, dtype>(batch, tile, Stage::kWorker);
  const auto owner_unit = make_unit<Codec, dtype>(batch, tile, Stage::kOwner);
  prefetch_payloads(payload_by_rank, world_size, tile.payload_offset, unit.payload_bytes);
  const bool is_zero =
      batch.hold_zero_tiles &&
      all_payloads_are_zero(payload_by_rank, world_size, tile.payload_offset, unit.payload_bytes);
  finish(batch,
         reduce_tile<Codec, dtype>(
             unit, owner_unit, tile, is_zero, [&](uint32_t rank) { return payload_by_rank[rank]; },
             world_size, gain, owner_residual, out));
}

template <typename Codec, ScalarType dtype>
__global__ void __launch_bounds__(kTileThreads, Codec::kMinBlocks)
    accumulate_kernel(BatchArguments<typename Codec::Options> batch,
                      const std::byte* const* payload_by_rank, uint32_t world_size,
                      uint32_t divisor, std::byte* gradient) {
  const Tile tile = batch.tiles[blockIdx.x];
  const auto unit = make_unit<Codec, dtype>(batch, tile, Stage::kWorker);
  prefetch_payloads(payload_by_rank, world_size, tile.payload_offset, unit.payload_bytes);
  float v[kLaneElements];
  uint32_t flags = sum_ranks<Codec, dtype>(
      unit, tile, [&](uint32_t rank) { return payload_by_rank[rank]; }, world_size, v);
  const float inverse = 1.0f / static_cast<float>(divisor);
  GRADFERRY_UNROLL
  for (float& x : v) x = canonical(x * inverse);
  std::byte* g = gradient + tile.gradient_offset * item_bytes(dtype);
  if (!store_slice<dtype>(unit.slice, g, v)) flags |= kTileNonFinite;
  finish(batch, {0, flags});
}

template <typename Codec, ScalarType dtype>
__global__ void __launch_bounds__(kTileThreads, Codec::kMinBlocks)
    undo_kernel(BatchArguments<typename Codec::Options> batch, const std::byte* own_payload,
                const std::byte* in, const std::byte* gradient, float alpha, float* residual) {
  if (!holds_nonfinite(batch)) return;  // the whole block
  const Tile tile = batch.tiles[blockIdx.x];
  undo_tile<Codec, dtype>(make_unit<Codec, dtype>(batch, tile, batch.stage),
                          make_unit<Codec, dtype>(batch, tile, Stage::kOwner), tile,
                          own_payload + tile.payload_offset, in + tile.output_offset, gradient,
                          alpha, residual);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
