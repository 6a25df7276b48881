// Codecs whose payload is the numbers in some dtype, on CUDA: `exact` and `bf16`. Their unit is the
// element, and the payload has the same order as the gradient.
#pragma once

#include "kernels/cuda/tile_kernels.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Writes v as `dtype`, and replaces v by the rounding error. adjust(x): what is written for a
// number that is not finite, or would not arrive so.
template <ScalarType dtype, typename Adjust>
GRADFERRY_DEVICE void encode_cast(const Slice& slice, uint32_t payload_bytes, float* v,
                                  PayloadWriter& out, Adjust adjust) {
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    float* x = v + kQuad * row;
    float adjusted[kQuad] = {x[0], x[1], x[2], x[3]};
    const bool is_finite = quad_arrives_finite<dtype>(x);
    if (!is_finite) {
      rare_path();
      GRADFERRY_UNROLL
      for (float& y : adjusted) y = canonical(adjust(y));
    }
    const Quad<dtype> quad = narrow_quad<dtype>(adjusted, is_finite);
    float decoded[kQuad];
    widen_quad<dtype>(quad, decoded);
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) x[i] = x[i] - decoded[i];
    // Beyond the tile's end v is zero, and so are the bytes, up to the payload's.
    const uint32_t offset = slice.element(row) * item_bytes(dtype);
    if (offset < payload_bytes) out.words(offset, quad);
  }
}

template <ScalarType dtype, typename Sink>
GRADFERRY_DEVICE uint32_t decode_cast(const Slice& slice, uint32_t payload_bytes,
                                      const std::byte* payload, Sink sink) {
  uint32_t flags = 0;
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    Quad<dtype> quad{};
    const uint32_t offset = slice.element(row) * item_bytes(dtype);
    if (offset < payload_bytes) quad = read<Quad<dtype>>(payload + offset);
    float x[kQuad];
    widen_quad<dtype>(quad, x);
    if (!quad_arrives_finite<ScalarType::kFloat32>(x)) {
      rare_path();
      GRADFERRY_UNROLL
      for (uint32_t i = 0; i < kQuad; ++i) {
        x[i] = canonical(x[i]);
        // Padding is ignored.
        const bool is_inside = slice.element(row) + i < slice.num_elements;
        if (is_inside && is_not_finite(x[i])) flags = kTileNonFinite;
      }
    }
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) sink(kQuad * row + i, x[i]);
  }
  return flags;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
