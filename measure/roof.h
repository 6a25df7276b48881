// Loops that move the bytes of a codec call and compute next to nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradferry/codec.h"

namespace gradferry {

// A stream is walked in slices, as a codec walks tiles: num_slices times bytes_per_slice, both
// pointer and bytes_per_slice multiples of 64.
struct RoofStream {
  enum class Kind { kRead, kUpdate, kWrite } kind;
  std::byte* data;
  size_t bytes_per_slice;
};

enum class RoofShape {
  kPhased,             // per slice: all reads, then all updates, then all writes
  kPhasedAhead,        // and the next slice is prefetched meanwhile
  kPhasedNonTemporal,  // writes go past the caches
  kPhasedAheadNonTemporal,
  kInterleaved,  // a cache line of every stream in turn
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
