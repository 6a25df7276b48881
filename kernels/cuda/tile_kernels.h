// What a thread block of 128 threads does with a tile, for every CUDA codec; slice.h says which
// thread has which elements. The kernels of chunks (kernels/cuda/chunk_*.h) call it. It is what
// kernels/common/tile_driver.h does on CPU, to the bit: gradients and residuals in and out, the sum
// over ranks, zero tiles, checksums. A codec supplies a class with
//
//   Options             trivially copyable: what CodecOptions holds
//   kRow                its row of the codec table
//   kByBlocks           the lanes' elements: see Slice
//   kUnitsAreQuads      a quad's elements share a unit, and a residual of a finite unit is finite
//   kUsesDtype          payloads depend on the gradient's dtype
//   static uint32_t payload_bytes(n, dtype, stage, options)
//   template <ScalarType dtype, bool kKeep>
//   static void encode(const TileUnit<Options>&, float* v, PayloadWriter& out)
//     Writes the payload of v, all of its bytes, and replaces v by v - D(p): by NaN in units that
//     are not finite, by anything if kKeep is false. v is +0 beyond the tile's end.
//   Raw<dtype>          what of a payload is a thread's, as it is in memory
//   template <ScalarType dtype>
//   static Raw<dtype> fetch(const TileUnit<Options>&, const std::byte* payload)
//     Loads it, and looks at nothing: what is done meanwhile hides how long that takes.
//   template <ScalarType dtype>
//   static void sum(const TileUnit<Options>&, const Raw<dtype>&, PayloadSum& sum)
//     Adds what the thread has of the payload: each byte is added by exactly one thread.
//   template <ScalarType dtype, typename Sink>
//   static uint32_t decode(const TileUnit<Options>&, const Raw<dtype>&, Sink sink)
//     Calls sink(j, value), or sink(j, a, b) for a * b where that is exact, for all kLaneElements
//     elements of the lane; anything beyond the tile's end. NaNs are canonical. Returns kTile*
//     flags.
//   static void set_sums(slice, x), uint32_t add(unit, raw), void take_sums(slice, float* v)
//     In place of decode() in sums of sparse payloads, which lie in scratch(): the thread's own
//     become x; add() adds to anyone's, behind a barrier, and returns flags; v becomes the lane's.
// All of them are called by whole blocks: they may use barriers and shared memory.
//
// What limits the kernels is memory: with error feedback 12 bytes per fp32 element and the
// payload. Each element and each byte of a payload is read once and written once; where a unit
// turns out not to be finite its residual is read again.
#pragma once

#include "kernels/codec_rows.h"
#include "kernels/common/codec_parts.h"
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

GRADFERRY_DEVICE void load_residual(const Slice& slice, const float* residual, float* x) {
  load_slice<ScalarType::kFloat32>(slice, reinterpret_cast<const std::byte*>(residual), x);
}

// residual = updated where that is finite, else the old value, converted to the current loss scale.
template <bool kByQuads>
GRADFERRY_DEVICE void store_residual(const Slice& slice, const float* updated, const float* gain,
                                     float* residual) {
  constexpr ScalarType kFloat = ScalarType::kFloat32;
  bool is_finite = true;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; j += kByQuads ? kQuad : 1) {
    is_finite = is_finite && arrives_finite<kFloat>(updated[j]);
  }
  auto* array = reinterpret_cast<std::byte*>(residual);
  if (__all_sync(kAllLanes, is_finite ? 1 : 0) != 0 && slice.goes_by_quads<kFloat>(array)) {
    return store_quads<kFloat>(slice, array, updated);
  }
  for_elements(slice, updated, [&](uint32_t i, float x) {
    residual[i] = is_not_finite(x) ? kept_residual(residual[i], gain) : x;
  });
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

// A whole payload, for codecs whose threads have no part of it for themselves.
GRADFERRY_DEVICE void add_payload(PayloadSum& sum, const std::byte* payload, uint32_t num_bytes) {
  for (uint32_t i = 16 * threadIdx.x; i < num_bytes; i += 16 * kTileThreads) {
    sum.add_words(i, read<Bytes16>(payload + i));
  }
}

// --- tiles ---------------------------------------------------------------------------------------
//
// Pointers are to the start of whole arrays, as in codec.h; a residual may be null. The lane's
// values are one array for all branches: with an array per branch, the compiler merges what
// branches have in common, and arrays go to local memory. What only some tiles load is 0 before, or
// it would keep its registers from tile to tile.

// v = factor * v + gain * old, or factor * v.
GRADFERRY_DEVICE void scale_and_add(float factor, const float* gain, bool adds, const float* old,
                                    float* v) {
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = factor * v[j];
  if (!adds) return;
  const float g = gain == nullptr ? 1.0f : *gain;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = v[j] + g * old[j];
}

// Writes the payload of v and what becomes of a residual, or null. Returns the thread's part of the
// payload's checksum.
template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE uint64_t encode_values(const TileUnit<typename Codec::Options>& unit,
                                        uint32_t message_offset, float* v, const float* gain,
                                        float* residual, std::byte* payload) {
  PayloadWriter writer(payload, message_offset);
  if (residual != nullptr) {
    Codec::template encode<dtype, true>(unit, v, writer);
    store_residual<Codec::kUnitsAreQuads>(unit.slice, v, gain, residual);
  } else {
    Codec::template encode<dtype, false>(unit, v, writer);
  }
  return writer.checksum;
}

// A tile that is held: its payload is zero, and its residual stays.
GRADFERRY_DEVICE void hold_tile(const Slice& slice, uint32_t payload_bytes, const float* gain,
                                float* residual, std::byte* payload) {
  rare_path();
  write_zero_payload(payload, payload_bytes);
  if (residual != nullptr) keep_residual(slice, residual, gain);
}

// Returns the thread's part of the payload's checksum.
template <typename Codec, ScalarType dtype>
GRADFERRY_DEVICE uint64_t encode_tile(const TileUnit<typename Codec::Options>& unit,
                                      const Tile& tile, bool hold_zero_tiles,
                                      const std::byte* gradient, float alpha, const float* gain,
                                      float* residual, std::byte* out) {
  const Slice& slice = unit.slice;
  std::byte* payload = out + tile.payload_offset;
  float* tile_residual = residual == nullptr ? nullptr : residual + tile.residual_offset;

  float v[kLaneElements], old[kLaneElements] = {};
  load_slice<dtype>(slice, gradient + tile.gradient_offset * item_bytes(dtype), v);
  if (residual != nullptr) load_residual(slice, tile_residual, old);
  if (hold_zero_tiles && __syncthreads_or(has_magnitude(v) ? 1 : 0) == 0) {
    hold_tile(slice, unit.payload_bytes, gain, tile_residual, payload);
    return 0;
  }
  scale_and_add(alpha, gain, residual != nullptr, old, v);
  return encode_values<Codec, dtype>(unit, tile.message_offset, v, gain, tile_residual, payload);
}

// Adds to an element of a residual, if the sum is finite.
GRADFERRY_DEVICE void add_finite(float* residual, float x) {
  const float sum = *residual + x;
  if (!is_not_finite(sum)) *residual = sum;
}

// Writes v, which has no NaN but the canonical one and is +0 beyond the tile's end, and adds beta
// times what arrives finite to a residual. Returns flags: a finite number may be infinite in the
// gradient's dtype.
template <ScalarType dtype>
GRADFERRY_DEVICE uint32_t store_values(const Slice& slice, const Tile& tile, const float* v,
                                       std::byte* gradient, float beta, float* residual) {
  const bool all_finite =
      store_slice<dtype>(slice, gradient + tile.gradient_offset * item_bytes(dtype), v);
  if (residual != nullptr && beta != 0.0f) {
    float* tile_residual = residual + tile.residual_offset;
    for_elements(slice, v, [&](uint32_t i, float x) {
      if (arrives_finite<dtype>(x)) add_finite(tile_residual + i, beta * x);
    });
  }
  // What fp32 does not hold has its flag already.
  return dtype == ScalarType::kFloat32 || all_finite ? 0 : kTileNonFinite;
}

// Where decoded values go.
struct Assign {
  float* v;
  GRADFERRY_DEVICE void operator()(uint32_t j, float x) const { v[j] = x; }
  GRADFERRY_DEVICE void operator()(uint32_t j, float a, float b) const { v[j] = a * b; }
};
struct Accumulate {
  float* v;
  GRADFERRY_DEVICE void operator()(uint32_t j, float x) const { v[j] = v[j] + x; }
  GRADFERRY_DEVICE void operator()(uint32_t j, float a, float b) const {
    v[j] = add_product(a, b, v[j]);
  }
};

// What the sum over ranks finds: kTileCorrupt or 0, and 0 if the thread has seen zeros alone.
struct RankSum {
  uint32_t flags, seen;
};

// v = the sum of the ranks' values in rank order, anything beyond the tile's end. inbox(rank):
// where the rank's payloads begin; inbox.note(rank, the thread's part of its payload's checksum).
// While a rank's values are added, the next one's are on their way, unless they take too many
// registers, or are a pointer: of one from the last round the compiler forgets where it points.
// Sums begin with -0: -0 + x is x for every x. In sparse payloads there is no -0, and +0 will do.
template <typename Codec, ScalarType dtype, typename Inbox>
GRADFERRY_DEVICE RankSum sum_ranks(const TileUnit<typename Codec::Options>& unit, const Tile& tile,
                                   const Inbox& inbox, uint32_t world_size, float* v) {
  using Raw = typename Codec::template Raw<dtype>;
  constexpr bool kAhead = sizeof(Raw) > sizeof(void*) && sizeof(Raw) <= 64;
  const auto fetch = [&](uint32_t rank) {
    return Codec::template fetch<dtype>(unit, inbox(rank) + tile.payload_offset);
  };
  constexpr bool kIsSparse = requires { Codec::set_sums; };
  if constexpr (kIsSparse) {
    Codec::set_sums(unit.slice, 0.0f);
  } else {
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) v[j] = -0.0f;
  }
  RankSum result{0, 0};
  Raw next{};
  if (kAhead) next = fetch(0);
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    const Raw raw = kAhead ? next : fetch(rank);
    if (kAhead && rank + 1 < world_size) next = fetch(rank + 1);
    PayloadSum sum(tile.payload_offset);
    Codec::template sum<dtype>(unit, raw, sum);
    result.seen |= sum.seen;
    inbox.note(rank, sum.checksum);
    if constexpr (kIsSparse) {
      result.flags |= Codec::add(unit, raw);
    } else {
      result.flags |= Codec::template decode<dtype>(unit, raw, Accumulate{v});
    }
  }
  if constexpr (kIsSparse) Codec::take_sums(unit.slice, v);
  result.flags &= kTileCorrupt;
  return result;
}

// A thread's part of a tile's status.
struct StatusPart {
  uint64_t checksum;
  uint32_t flags;
};

// unit_of(stage): the tile's unit. That of the owner's stage takes no registers before it is used.
template <typename Codec, ScalarType dtype, typename UnitOf, typename Inbox>
GRADFERRY_DEVICE StatusPart reduce_tile(UnitOf unit_of, const Tile& tile, bool hold_zero_tiles,
                                        const Inbox& inbox, uint32_t world_size, const float* gain,
                                        float* owner_residual, std::byte* out) {
  float v[kLaneElements];
  const RankSum sum = sum_ranks<Codec, dtype>(unit_of(Stage::kWorker), tile, inbox, world_size, v);
  const auto unit = unit_of(Stage::kOwner);
  const Slice& slice = unit.slice;
  std::byte* payload = out + tile.output_offset;
  float* tile_residual =
      owner_residual == nullptr ? nullptr : owner_residual + tile.residual_offset;
  if (hold_zero_tiles && __syncthreads_or(sum.seen != 0 ? 1 : 0) == 0) {
    hold_tile(slice, unit.payload_bytes, gain, tile_residual, payload);
    return {0, 0};
  }
  float old[kLaneElements] = {};
  if (owner_residual != nullptr) load_residual(slice, tile_residual, old);
  scale_and_add(1.0f / static_cast<float>(world_size), gain, owner_residual != nullptr, old, v);
  clear_beyond_end(slice, v);
  return {encode_values<Codec, dtype>(unit, tile.message_offset, v, gain, tile_residual, payload),
          sum.flags};
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
