// The exact codec on CUDA: the gradient's own numbers. Bound by memory at every dtype. fp64 is
// summed in fp64 and so has kernels of its own, exact_float64_tiles.h.
#pragma once

#include "kernels/cuda/cast_kernels.h"
#include "kernels/exact/exact_float64_tiles.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact {

struct Exact {
  using Options = NoOptions;
  static constexpr bool kUnitsAreQuads = false;
  static constexpr bool kUsesDtype = true;
  // By itself the compiler spills in decode of fp32 on sm_80.
  static constexpr uint32_t kMinBlocks = 4;

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType dtype, Stage, Options) {
    return round_up(n * item_bytes(dtype), kPayloadAlignment);
  }
  template <ScalarType dtype, bool>
  GRADFERRY_DEVICE static void encode(const TileUnit<Options>& unit, float* v, PayloadWriter& out) {
    encode_cast<dtype>(unit.slice, unit.payload_bytes, v, out, [](float x) { return x; });
  }
  template <ScalarType dtype, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const std::byte* payload,
                                          Sink sink) {
    return decode_cast<dtype>(unit.slice, unit.payload_bytes, payload, sink);
  }
};

using TileCodec = Exact;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact
