// A bf16 scale per block of 128 elements (block_scale.h), on CUDA: a block is a row of a warp's
// slice (slice.h), and lane l looks after the scale of row l % 8.
#pragma once

#include "kernels/common/block_scale.h"
#include "kernels/cuda/tile_kernels.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

static_assert(block_scale::kBlock == kRowElements);

// The block whose scale the lane looks after, of those of the tile.
GRADFERRY_DEVICE uint32_t own_block(const Slice& slice) {
  return kRows * slice.warp + slice.lane % kRows;
}
GRADFERRY_DEVICE bool own_block_exists(const Slice& slice) {
  return own_block(slice) < block_scale::num_blocks(slice.num_elements);
}

// What the lane that looks after a row says of it.
template <typename T>
GRADFERRY_DEVICE T of_row(T x, uint32_t row) {
  return __shfl_sync(kAllLanes, x, static_cast<int>(row));
}

GRADFERRY_DEVICE void write_scale(const Slice& slice, uint32_t scales_offset, uint32_t pattern,
                                  PayloadWriter& out) {
  if (slice.lane < kRows && own_block_exists(slice)) {
    out.halfword(scales_offset + 2 * own_block(slice), pattern);
  }
}

// What of a payload follows its codes: the pattern of the lane's row, or 0 if there is none, and a
// byte of padding.
struct RawScale {
  uint32_t pattern, padding;
};
GRADFERRY_DEVICE RawScale fetch_scale(const Slice& slice, const std::byte* payload,
                                      uint32_t scales_offset, uint32_t payload_bytes) {
  const uint32_t end = scales_offset + 2 * block_scale::num_blocks(slice.num_elements);
  const std::byte* own = payload + scales_offset + 2 * own_block(slice);
  return {own_block_exists(slice) ? read<uint16_t>(own) : block_scale::kZero,
          read_padding(payload, end, payload_bytes)};
}
GRADFERRY_DEVICE void sum_scale(const Slice& slice, uint32_t scales_offset, const RawScale& raw,
                                PayloadSum& sum) {
  const uint32_t end = scales_offset + 2 * block_scale::num_blocks(slice.num_elements);
  sum.add(scales_offset + 2 * own_block(slice), slice.lane < kRows ? raw.pattern : 0);
  sum.add(end + threadIdx.x, raw.padding);
}

// The scale of a pattern: 0 of a zero block or of none, NaN of one without numbers.
struct RowScale {
  float scale;
  uint32_t flags;
};
GRADFERRY_DEVICE RowScale scale_of_pattern(uint32_t pattern, uint32_t largest, bool is_broken) {
  if (pattern == block_scale::kZero) return {0.0f, 0};
  const bool in_range = pattern >= block_scale::kSmallest && pattern <= largest;
  if (in_range && !is_broken) return {bf16_to_float(pattern), 0};
  const bool valid = pattern == block_scale::kNonFinite;
  return {from_bits(kNanBits), valid ? kTileNonFinite : kTileNonFinite | kTileCorrupt};
}

GRADFERRY_DEVICE uint32_t warp_or(uint32_t x) { return __reduce_or_sync(kAllLanes, x); }

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
