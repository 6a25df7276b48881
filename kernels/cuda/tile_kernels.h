// What a thread block of 128 threads does with a tile, for every CUDA codec; slice.h says which
// thread has which elements. The kernels of chunks (kernels/chunk_*.h) call it. It is what
// kernels/common/tile_driver.h does on CPU, to the bit: gradients and residuals in and out, the sum
// over ranks, zero tiles, checksums. A codec supplies a class with
//
//   Options             trivially copyable: what CodecOptions holds
//   kUnitsAreQuads      a quad's elements share a unit, and a residual of a finite unit is finite
//   kUsesDtype          payloads depend on the gradient's dtype
//   kMinBlocks          for __launch_bounds__: 0 leaves registers to the compiler, 1 lets it take
//                       what keeps everything out of local memory
//   static uint32_t payload_bytes(n, dtype, stage, options)
//   template <ScalarType dtype, bool kKeep>
//   static void encode(const TileUnit<Options>&, float* v, PayloadWriter& out)
//     Writes the payload of v, all of its bytes, and replaces v by v - D(p): by NaN in units that
//     are not finite, by anything if kKeep is false. v is +0 beyond the tile's end.
//   template <ScalarType dtype, typename Sink>
//   static uint32_t decode(const TileUnit<Options>&, const std::byte* payload, Sink sink)
//     Calls sink(j, value) for all kLaneElements elements of the lane, in order; anything beyond
//     the tile's end. NaNs are canonical. Returns kTile* flags.
// encode and decode are called by whole blocks: they may use barriers and shared memory.
//
// What limits the kernels is memory: with error feedback 12 bytes per fp32 element and the
// payload. Each element is read once and written once; where a unit turns out not to be finite its
// residual is read again.
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/cuda/block_collectives.h"
#include "kernels/cuda/payload_writer.h"
#include "kernels/cuda/slice.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

template <typename Options>
struct TileUnit {
  Slice slice;
  Stage stage;
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

template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE TileUnit<typename Codec::Options> make_unit(
    const Tile& tile, Stage stage, uint64_t seed, uint64_t step,
    const typename Codec::Options& options) {
  return {Slice(tile.num_elements),
          stage,
          Codec::payload_bytes(tile.num_elements, dtype, stage, options),
          tile.id,
          seed,
          step,
          options};
}

// --- tiles ---------------------------------------------------------------------------------------
//
// Pointers are to the start of whole arrays, as in codec.h; a residual may be null. The lane's
// values are one array for all branches: with an array per branch, the compiler merges what
// branches have in common, and arrays go to local memory.

// Returns the thread's part of the payload's checksum.
template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE uint64_t encode_tile(const TileUnit<typename Codec::Options>& unit,
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
    return 0;
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
  if (residual != nullptr) {
    Codec::template encode<dtype, true>(unit, v, writer);
    store_residual<Codec::kUnitsAreQuads>(slice, v, gain, tile_residual);
  } else {
    Codec::template encode<dtype, false>(unit, v, writer);
  }
  return writer.checksum;
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

// Writes what decode_values() gave. Returns flags: a finite number may be infinite in the
// gradient's dtype.
template <ScalarType dtype>
GRADFERRY_DEVICE uint32_t store_values(const Slice& slice, const Tile& tile, const float* v,
                                       std::byte* gradient, float beta, float* residual) {
  const bool all_finite =
      store_slice<dtype>(slice, gradient + tile.gradient_offset * item_bytes(dtype), v);
  if (residual != nullptr && beta != 0.0f) {
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

// v = the mean of the ranks' values, as sum_ranks() adds them, +0 beyond the tile's end. NaNs are
// canonical. Returns kTileCorrupt or 0.
template <typename Codec, ScalarType dtype, typename PayloadOf>
GRADFERRY_DEVICE uint32_t average_ranks(const TileUnit<typename Codec::Options>& unit,
                                        const Tile& tile, PayloadOf payload_of, uint32_t world_size,
                                        float* v) {
  const uint32_t flags = sum_ranks<Codec, dtype>(unit, tile, payload_of, world_size, v);
  const float inverse = 1.0f / static_cast<float>(world_size);
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = canonical(v[j] * inverse);
  clear_beyond_end(unit.slice, v);
  return flags;
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
  const uint32_t flags = sum_ranks<Codec, dtype>(unit, tile, payload_of, world_size, v);
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
    Codec::template encode<dtype, true>(owner_unit, v, writer);
    store_residual<Codec::kUnitsAreQuads>(slice, v, gain, tile_residual);
  } else {
    Codec::template encode<dtype, false>(owner_unit, v, writer);
  }
  return {writer.checksum, flags};
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
