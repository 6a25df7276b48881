// Codecs whose payload is the numbers in some dtype, on CUDA: `exact` and `bf16`. Their unit is the
// element, and the payload has the same order as the gradient. Bound by memory at every dtype.
#pragma once

#include "kernels/cuda/tile_kernels.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// In the gradient's dtype, or else in bf16, where large numbers become the largest one.
template <CodecRow row, bool kOwnDtype>
struct CastCodec {
  using Options = NoOptions;
  static constexpr CodecRow kRow = row;
  static constexpr bool kByBlocks = false;
  static constexpr bool kUnitsAreQuads = false;
  static constexpr bool kUsesDtype = kOwnDtype;
  static constexpr ScalarType of(ScalarType dtype) {
    return kOwnDtype ? dtype : ScalarType::kBFloat16;
  }
  template <ScalarType dtype>
  struct Raw {
    Quad<of(dtype)> quads[kRows];
  };

  GRADFERRY_DEVICE static uint32_t payload_bytes(uint32_t n, ScalarType dtype, Stage, Options) {
    return round_up(n * (kOwnDtype ? item_bytes(dtype) : 2), kPayloadAlignment);
  }

  template <ScalarType dtype, bool>
  GRADFERRY_DEVICE static void encode(const TileUnit<Options>& unit, float* v, PayloadWriter& out) {
    constexpr ScalarType kItem = of(dtype);
    GRADFERRY_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      float* x = v + kQuad * r;
      float adjusted[kQuad] = {x[0], x[1], x[2], x[3]};
      const bool is_finite = quad_arrives_finite<kItem>(x);
      if (!is_finite) {
        rare_path();
        GRADFERRY_UNROLL
        for (float& y : adjusted) y = canonical(kOwnDtype ? y : saturate_bf16(y));
      }
      const Quad<kItem> quad = narrow_quad<kItem>(adjusted, is_finite);
      float decoded[kQuad];
      widen_quad<kItem>(quad, decoded);
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) x[i] = x[i] - decoded[i];
      // Beyond the tile's end v is zero, and so are the bytes, up to the payload's.
      const uint32_t first = unit.slice.first * item_bytes(kItem);
      const uint32_t further = r * kRowElements * item_bytes(kItem);
      if (first + further < unit.payload_bytes) out.words(first, quad, further);
    }
  }

  template <ScalarType dtype>
  GRADFERRY_DEVICE static Raw<dtype> fetch(const TileUnit<Options>& unit,
                                           const std::byte* payload) {
    Raw<dtype> raw{};
    GRADFERRY_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      const uint32_t offset = unit.slice.element(r) * item_bytes(of(dtype));
      if (offset < unit.payload_bytes) raw.quads[r] = read<Quad<of(dtype)>>(payload + offset);
    }
    return raw;
  }

  template <ScalarType dtype>
  GRADFERRY_DEVICE static void sum(const TileUnit<Options>& unit, const Raw<dtype>& raw,
                                   PayloadSum& sum) {
    GRADFERRY_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      sum.add_words(unit.slice.first * item_bytes(of(dtype)), raw.quads[r],
                    r * kRowElements * item_bytes(of(dtype)));
    }
  }

  template <ScalarType dtype, typename Sink>
  GRADFERRY_DEVICE static uint32_t decode(const TileUnit<Options>& unit, const Raw<dtype>& raw,
                                          Sink sink) {
    uint32_t flags = 0;
    GRADFERRY_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) {
      float x[kQuad];
      widen_quad<of(dtype)>(raw.quads[r], x);
      if (!quad_arrives_finite<ScalarType::kFloat32>(x)) {
        rare_path();
        const uint32_t element = fresh(unit.slice.element(r));
        GRADFERRY_UNROLL
        for (uint32_t i = 0; i < kQuad; ++i) {
          x[i] = canonical(x[i]);
          // Padding is ignored.
          const bool is_inside = element + i < unit.slice.num_elements;
          if (is_inside && is_not_finite(x[i])) flags = kTileNonFinite;
        }
      }
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) sink(kQuad * r + i, x[i]);
    }
    return flags;
  }
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
