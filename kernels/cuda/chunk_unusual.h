// What the last block of a kernel that writes gradients does if a message was refused or a tile is
// not finite, which does not happen often.
#pragma once

#include "kernels/cuda/chunk_parts.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

inline constexpr uint32_t kNoTile = 0xffffffffu;

// The index of the first tile for which is_so(index) is true, or kNoTile.
template <typename IsSo>
GRADFERRY_DEVICE uint32_t first_tile(const ChunkBatch& chunk, IsSo is_so) {
  for (uint32_t i = 0; i < chunk.num_tiles; i += kTileThreads) {
    const uint32_t own = i + threadIdx.x;
    if (__syncthreads_or(own < chunk.num_tiles && is_so(own) ? 1 : 0) == 0) continue;
    while (!is_so(i)) ++i;
    return i;
  }
  return kNoTile;
}

GRADFERRY_DEVICE void note_nonfinite(const Tile& tile, Findings* findings) {
  if (findings->nonfinite_tile == 0) findings->nonfinite_tile = tile.id + 1;
}

GRADFERRY_DEVICE void fill_nan(void* gradient, const Tile& tile, ScalarType dtype) {
  const uint32_t item = item_bytes(dtype);
  std::byte* first = static_cast<std::byte*>(gradient) + tile.gradient_offset * item;
  for (uint32_t i = threadIdx.x; i < tile.num_elements; i += kTileThreads) {
    std::byte* element = first + uint64_t{i} * item;
    switch (dtype) {
      case ScalarType::kFloat32: write(element, kNanBits); break;
      case ScalarType::kBFloat16: write(element, uint16_t{0x7fc0}); break;
      case ScalarType::kFloat16: write(element, uint16_t{0x7e00}); break;
      case ScalarType::kFloat64: write(element, uint64_t{0x7ff8000000000000}); break;
    }
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
