// The roof's loops, compiled once per instruction set like the kernels.
#include "benchmarks/roof.h"
#include "kernels/common/simd.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

constexpr size_t kLine = 64;
constexpr uint32_t kLineFloats = 16;

// One cache line of a stream. `carried` keeps the reads alive and feeds the writes.
template <bool kNonTemporal>
GRADFERRY_LANE void touch(RoofStream::Kind kind, std::byte* p, F32& carried) {
  auto* x = reinterpret_cast<float*>(p);
  for (uint32_t i = 0; i < kLineFloats; i += kLanes) {
    if (kind == RoofStream::Kind::kRead) {
      carried = from_bits(bits(carried) | bits(load(x + i)));
    } else if (kind == RoofStream::Kind::kUpdate) {
      store(x + i, from_bits(bits(load(x + i)) ^ bits(carried)));
    } else if (kNonTemporal) {
      stream(x + i, carried);
    } else {
      store(x + i, carried);
    }
  }
}

template <bool kAhead, bool kNonTemporal>
void phased(std::span<const RoofStream> streams, size_t num_slices) {
  F32 carried(0.0f);
  for (size_t slice = 0; slice < num_slices; ++slice) {
    for (const RoofStream& s : streams) {
      std::byte* p = s.data + slice * s.bytes_per_slice;
      const auto walk = [&](RoofStream::Kind kind) {
        for (size_t offset = 0; offset < s.bytes_per_slice; offset += kLine) {
          if (kAhead && kind != RoofStream::Kind::kWrite) prefetch(p + s.bytes_per_slice + offset);
          touch<kNonTemporal>(kind, p + offset, carried);
        }
      };
      // The kind is constant in each loop.
      switch (s.kind) {
        case RoofStream::Kind::kRead: walk(RoofStream::Kind::kRead); break;
        case RoofStream::Kind::kUpdate: walk(RoofStream::Kind::kUpdate); break;
        case RoofStream::Kind::kWrite: walk(RoofStream::Kind::kWrite); break;
      }
    }
  }
}

}  // namespace

void roof(RoofShape shape, std::span<const RoofStream> streams, size_t num_slices) {
  switch (shape) {
    case RoofShape::kPlain: return phased<false, false>(streams, num_slices);
    case RoofShape::kAhead: return phased<true, false>(streams, num_slices);
    case RoofShape::kNonTemporal: return phased<false, true>(streams, num_slices);
    case RoofShape::kAheadNonTemporal: return phased<true, true>(streams, num_slices);
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
