// Loops that move the same bytes as a codec call and compute almost nothing.
#pragma once

#include <cstddef>
#include <span>

namespace gradferry {

// One array that a loop reads or writes, in num_slices slices of bytes_per_slice, as a codec does
// with tiles. `data` and bytes_per_slice are multiples of 64.
struct RoofStream {
  enum class Kind { kRead, kUpdate, kWrite } kind;
  std::byte* data;
  size_t bytes_per_slice;
};

// Each loop does, per slice, all reads, then all updates, then all writes.
enum class RoofShape {
  kPlain,
  kAhead,        // and prefetches the next slice
  kNonTemporal,  // with stores that bypass the caches
  kAheadNonTemporal,
};

// One per instruction set, from roof_loops.cpp.
#define GRADFERRY_DECLARE_ROOF(isa)                                                   \
  namespace isa {                                                                     \
  void roof(RoofShape shape, std::span<const RoofStream> streams, size_t num_slices); \
  }
GRADFERRY_DECLARE_ROOF(scalar)
GRADFERRY_DECLARE_ROOF(avx2)
GRADFERRY_DECLARE_ROOF(avx512)

}  // namespace gradferry
