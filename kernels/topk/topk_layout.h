// topk: the k largest magnitudes of each tile, with their positions. docs/reference/wire_format.md,
// section "topk".
//
// A payload is two sections: the k values, in the order of their positions, then the positions.
// Values come first so that they are aligned on every device.
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/common/conversions.h"
#include "kernels/common/e2m1.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk {

// Ratios are whole millionths, so that k is the same integer everywhere.
inline constexpr uint32_t kRatioOne = 1000000;
inline constexpr uint32_t kLargestRatio = kRatioOne / 4;
inline constexpr uint32_t kMostKept = kTileElements / 4;
static_assert(kMostKept <= e2m1::kGroup);

inline constexpr uint32_t kNonFiniteValue = kNanBits >> 16;  // the first bf16 of a non-finite tile

struct Options {
  uint32_t ratio;        // millionths
  uint32_t owner_ratio;  // millionths, at least `ratio`
  bool q4_values;        // else bf16
};

// round(ratio * n), halves up, at least 1: between 1 and n.
GRADFERRY_LANE uint32_t num_kept(uint32_t num_elements, uint32_t ratio) {
  const uint32_t k = (ratio * num_elements + kRatioOne / 2) / kRatioOne;
  return k == 0 ? 1 : k;
}

// 4-bit values are one group of e2m1.h; its last block has no bytes for values that do not exist.
GRADFERRY_LANE uint32_t code_bytes(uint32_t k) {
  const uint32_t rest = k % e2m1::kBlock;
  return k / e2m1::kBlock * e2m1::kHalfBlock + (rest < e2m1::kHalfBlock ? rest : e2m1::kHalfBlock);
}
GRADFERRY_LANE uint32_t num_blocks(uint32_t k) { return (k + e2m1::kBlock - 1) / e2m1::kBlock; }

struct Layout {
  uint32_t num_elements;
  uint32_t k;
  uint32_t values_bytes;
  uint32_t positions_bytes;
  bool bitmap;  // positions are one bit per element, else 12 bits per kept element
  bool q4_values;
};

GRADFERRY_LANE Layout layout_of(uint32_t num_elements, Stage stage, const Options& options) {
  Layout layout;
  layout.num_elements = num_elements;
  layout.k = num_kept(num_elements, stage == Stage::kOwner ? options.owner_ratio : options.ratio);
  layout.q4_values = options.q4_values;
  layout.values_bytes =
      options.q4_values ? code_bytes(layout.k) + num_blocks(layout.k) + 1 : 2 * layout.k;
  const uint32_t index_bytes = (3 * layout.k + 1) / 2;
  const uint32_t bitmap_bytes = (num_elements + 7) / 8;
  layout.bitmap = bitmap_bytes < index_bytes;
  layout.positions_bytes = layout.bitmap ? bitmap_bytes : index_bytes;
  return layout;
}

GRADFERRY_LANE uint32_t payload_bytes(uint32_t num_elements, Stage stage, const Options& options) {
  const Layout layout = layout_of(num_elements, stage, options);
  return round_up(layout.values_bytes + layout.positions_bytes, kPayloadAlignment);
}
inline uint32_t payload_bytes(uint32_t num_elements, ScalarType, Stage stage,
                              const CodecOptions& options) {
  return payload_bytes(num_elements, stage, options.as<Options>());
}

// The bf16 of a finite value, as 16 bits. Zero has no sign.
template <typename F>
GRADFERRY_LANE BitsOf<F> encode_value(F x) {
  using U = BitsOf<F>;
  const U rounded = float_to_bf16(saturate_bf16(x));
  return select(rounded == U(kSignBit >> 16), U(0u), rounded);
}

// Adding +0 takes the sign off a zero, which no encoder writes.
template <typename F>
GRADFERRY_LANE F unsigned_zero(F x) {
  return x + F(0.0f);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk
