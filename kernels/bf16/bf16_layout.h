// bf16: numbers cast to bfloat16, two bytes each. docs/wire_format.md, section "bf16".
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/common/conversions.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::bf16 {

GRADFERRY_LANE uint32_t payload_bytes(uint32_t num_elements, ScalarType, Stage,
                                      const CodecOptions&) {
  return round_up(2 * num_elements, kPayloadAlignment);
}

// Finite numbers stay finite: what would round to infinity becomes the largest bf16.
template <typename F>
GRADFERRY_LANE F saturate(F x) {
  using U = BitsOf<F>;
  constexpr uint32_t kLargest = 0x7f7f0000u;
  const U magnitude = magnitude_bits(x);
  const auto too_large = (magnitude >= U(kLargest)) & (magnitude <= U(kInfinityBits - 1));
  return select(too_large, from_bits((bits(x) & U(kSignBit)) | U(kLargest)), x);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::bf16
