// The bf16 codec on CUDA: see tile_kernels.h for the map from threads to elements. Bound by memory:
// encoding moves 4 bytes in and 2 out per fp32 element, and 8 more with a residual.
#pragma once

#include "kernels/bf16/bf16_layout.h"
#include "kernels/cuda/cast_kernels.h"
#include "kernels/cuda/tile_kernels.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::bf16 {

struct Bf16 {
  using Options = NoOptions;
  static constexpr bool kUnitsAreQuads = false;
  static constexpr bool kUsesDtype = false;
  static constexpr uint32_t kMinBlocks = 0;

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType dtype, Stage stage,
                                                 Options) {
    return bf16::payload_bytes(n, dtype, stage, CodecOptions());
  }
  template <ScalarType, bool>
  GRADFERRY_DEVICE static void encode(const TileUnit<Options>& unit, float* v, PayloadWriter& out) {
    encode_cast<ScalarType::kBFloat16>(unit.slice, unit.payload_bytes, v, out,
                                       [](float x) { return saturate_bf16(x); });
  }
  template <ScalarType, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const std::byte* payload,
                                          Sink sink) {
    return decode_cast<ScalarType::kBFloat16>(unit.slice, unit.payload_bytes, payload, sink);
  }
};

using TileCodec = Bf16;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::bf16
