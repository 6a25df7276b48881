// Loops that move the same bytes as a codec call and compute almost nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradferry/codec.h"

namespace gradferry {

// One array that a loop reads or writes, in num_slices slices of bytes_per_slice, as a codec does
// with tiles. `data` and bytes_per_slice are multiples of 64.
struct RoofStream {
  enum class Kind { kRead, kUpdate, kWrite } kind;
  std::byte* data;
  size_t bytes_per_slice;
};

enum class RoofShape {
  kPhased,             // per slice: all reads, then all updates, then all writes
  kPhasedAhead,        // the same, and prefetches the next slice
  kPhasedNonTemporal,  // as kPhased, with stores that bypass the caches
  kPhasedAheadNonTemporal,
  kInterleaved,  // one cache line of every stream in turn
  kInterleavedNonTemporal,
};
inline constexpr RoofShape kRoofShapes[] = {
    RoofShape::kPhased,
    RoofShape::kPhasedAhead,
    RoofShape::kPhasedNonTemporal,
    RoofShape::kPhasedAheadNonTemporal,
    RoofShape::kInterleaved,
    RoofShape::kInterleavedNonTemporal,
};

void run_roof(Isa isa, RoofShape shape, std::span<const RoofStream> streams, size_t num_slices);

}  // namespace gradferry
