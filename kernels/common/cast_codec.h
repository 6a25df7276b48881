// Codecs whose payload is the numbers in some dtype: `exact` and `bf16`. Their unit is the element.
#pragma once

#include "kernels/common/tile_driver.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Writes the unit's v, after `adjust`, as `dtype` to the payload.
template <ScalarType dtype, typename Adjust>
uint32_t encode_cast(const Unit& unit, const float* v, std::byte* payload, float* residual,
                     Adjust adjust) {
  constexpr uint32_t kItem = item_bytes(dtype);
  std::byte* out = payload + unit.first * kItem;
  U32 largest(0u);
  const auto cast = [&](uint32_t i, std::byte* p) {
    for (uint32_t l = 0; l < kChunk; l += kLanes) {
      const F32 x = load(v + i + l);
      const F32 decoded = store_number<dtype>(p + l * kItem, adjust(x));
      largest = maximum(largest, magnitude_bits(decoded));
      if (residual != nullptr) {
        const F32 withheld = x - decoded;
        const F32 old = load(residual + i + l);
        store(residual + i + l, select(is_not_finite(withheld), old, withheld));
      }
    }
  };
  for_chunks(
      unit.num_elements, [&](uint32_t i) { cast(i, out + i * kItem); },
      [&](uint32_t i, uint32_t count) {
        alignas(64) std::byte p[kChunk * kItem];
        cast(i, p);
        __builtin_memcpy(out + i * kItem, p, count * kItem);
      });
  return reduce_maximum(largest) >= kInfinityBits ? kTileNonFinite : 0;
}

template <ScalarType dtype, typename Sink>
uint32_t decode_cast(const Unit& unit, const std::byte* payload, Sink sink) {
  constexpr uint32_t kItem = item_bytes(dtype);
  const std::byte* in = payload + unit.first * kItem;
  U32 largest(0u);
  const auto widen = [&](uint32_t i, const std::byte* p) {
    for (uint32_t l = 0; l < kChunk; l += kLanes) {
      const F32 x = canonical(load_number<dtype>(p + l * kItem));
      largest = maximum(largest, magnitude_bits(x));
      sink(i + l, x);
    }
  };
  for_chunks(
      unit.num_elements, [&](uint32_t i) { widen(i, in + i * kItem); },
      [&](uint32_t i, uint32_t count) {
        alignas(64) std::byte p[kChunk * kItem] = {};
        __builtin_memcpy(p, in + i * kItem, count * kItem);
        widen(i, p);
      });
  return reduce_maximum(largest) >= kInfinityBits ? kTileNonFinite : 0;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
