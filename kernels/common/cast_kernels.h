// Codecs whose payload is the numbers in some dtype, on CUDA: `exact` and `bf16`. Their unit is the
// element, and the payload has the same order as the gradient.
#pragma once

#include "kernels/common/tile_kernels.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Writes v, after `adjust`, as `dtype`, and replaces v by the rounding error.
template <ScalarType dtype, typename Adjust>
GRADFERRY_DEVICE uint32_t encode_cast(const Slice& slice, uint32_t payload_bytes, float* v,
                                      PayloadWriter& out, Adjust adjust) {
  constexpr uint32_t kItem = item_bytes(dtype);
  uint32_t largest = 0;
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t items[kQuad];
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) {
      float& x = v[kQuad * row + i];
      items[i] = narrow<dtype>(canonical(adjust(x)));
      const float decoded = widen<dtype>(items[i]);
      largest = maximum(largest, magnitude_bits(decoded));
      x = x - decoded;
    }
    // Beyond the tile's end v is zero, and so are the bytes, up to the payload's.
    const uint32_t offset = slice.element(row) * kItem;
    if (offset >= payload_bytes) continue;
    if constexpr (kItem == 4) {
      out.words(offset, Bytes16{{items[0], items[1], items[2], items[3]}});
    } else {
      out.words(offset, Bytes8{{items[0] | items[1] << 16, items[2] | items[3] << 16}});
    }
  }
  return largest >= kInfinityBits ? kTileNonFinite : 0;
}

template <ScalarType dtype, typename Sink>
GRADFERRY_DEVICE uint32_t decode_cast(const Slice& slice, uint32_t payload_bytes,
                                      const std::byte* payload, Sink sink) {
  constexpr uint32_t kItem = item_bytes(dtype);
  uint32_t largest = 0;
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    float x[kQuad] = {};
    const uint32_t offset = slice.element(row) * kItem;
    if (offset < payload_bytes) load_quad<dtype>(payload + offset, x);
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) {
      const float value = canonical(x[i]);
      // Padding is ignored.
      if (slice.element(row) + i < slice.num_elements) {
        largest = maximum(largest, magnitude_bits(value));
      }
      sink(kQuad * row + i, value);
    }
  }
  return largest >= kInfinityBits ? kTileNonFinite : 0;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
