// How the elements of a tile lie on the threads of its block. Four warps share a tile; each has a
// slice of 1024 elements in 8 rows of 128, and a lane has 4 neighbours of every row, a quad:
//
//   element 1024 * warp + 128 * row + 4 * lane + i  is  x[4 * row + i] of its lane
//
// A warp so reads and writes whole 512-byte lines of fp32 with one 16-byte access per lane. Blocks
// of 128 elements are rows, blocks of 32 are the quads of 8 neighbouring lanes (an octet), and
// groups of 1024 are slices: every scale is found within a warp, without shared memory or barriers.
// 32 elements per lane in registers keep enough loads on the way (256 bytes per lane with a
// residual).
#pragma once

#include "kernels/cuda/quads.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

inline constexpr uint32_t kRows = 8;
inline constexpr uint32_t kRowElements = 128;
inline constexpr uint32_t kLaneElements = kRows * kQuad;
inline constexpr uint32_t kSliceElements = kRows * kRowElements;
inline constexpr uint32_t kTileThreads = kTileElements / kLaneElements;  // 128

struct Slice {
  uint32_t num_elements;  // of the tile
  uint32_t warp;
  uint32_t lane;
  uint32_t first;  // element of the lane's quad in row 0

  GRADFERRY_DEVICE explicit Slice(uint32_t tile_elements)
      : num_elements(tile_elements),
        warp(threadIdx.x / kWarpLanes),
        lane(threadIdx.x % kWarpLanes),
        first(warp * kSliceElements + lane * kQuad) {}

  GRADFERRY_DEVICE uint32_t element(uint32_t row) const { return first + row * kRowElements; }
  // The same for all lanes of a warp:
  GRADFERRY_DEVICE bool is_empty() const { return warp * kSliceElements >= num_elements; }
  GRADFERRY_DEVICE bool is_whole() const {
    if constexpr (kHotPathOnly) return true;
    return warp * kSliceElements + kSliceElements <= num_elements;
  }
};

// --- slices --------------------------------------------------------------------------------------
//
// Whole slices go by quads, back to back. Where memory's quads are not the lanes', a lane accesses
// the one that begins within its own, and neighbours exchange the rest; only the slice's ends go
// item by item. Other slices do so everywhere, which a warp does to the same lines.

// x = the lane's elements of a tile's array, +0 beyond its end: one by one.
template <ScalarType dtype>
GRADFERRY_DEVICE void load_elements(const Slice& slice, const std::byte* array, float* x) {
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) {
    const uint32_t element = slice.element(j / kQuad) + j % kQuad;
    const std::byte* p = array + element * item_bytes(dtype);
    x[j] = element < slice.num_elements ? load_item<dtype>(p) : 0.0f;
  }
}

// The same, together where that can be.
template <ScalarType dtype>
GRADFERRY_DEVICE void load_slice(const Slice& slice, const std::byte* array, float* x) {
  constexpr uint32_t kItem = item_bytes(dtype);
  if (!slice.is_whole()) return load_elements<dtype>(slice, array, x);
  const uint32_t off = items_off_quads<dtype>(array);
  const uint32_t skipped = (kQuad - off) % kQuad;  // up to memory's next quad
  const bool is_last_lane = slice.lane == kWarpLanes - 1;
  Quad<dtype> quads[kRows];
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    const std::byte* p = array + (slice.element(row) + skipped) * kItem;
    const bool is_end = off != 0 && row == kRows - 1 && is_last_lane;
    quads[row] = is_end ? load_items<dtype>(p, 0, off) : read<Quad<dtype>>(p);
  }
  if (off != 0) {
    const std::byte* begin = array + slice.warp * kSliceElements * kItem;
    Quad<dtype> skipped_items{};
    if (is_last_lane) skipped_items = load_items<dtype>(begin - off * kItem, off, kQuad);
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kRows; ++i) {
      const uint32_t row = kRows - 1 - i;
      const Quad<dtype> row_before = row == 0 ? skipped_items : quads[row - 1];
      const Quad<dtype> before = from_lane_before<dtype>(slice.lane, quads[row], row_before);
      quads[row] = quad_across<dtype>(before, quads[row], off);
    }
  }
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) widen_quad<dtype>(quads[row], x + kQuad * row);
}

// Whether a residual's slice goes by quads. Its lanes write what they read, so that none may read
// what is another's: where memory's quads are not theirs, which engines avoid, it goes one by one.
GRADFERRY_DEVICE bool goes_by_quads(const Slice& slice, const float* residual) {
  return slice.is_whole() && items_off_quads<ScalarType::kFloat32>(residual) == 0;
}

GRADFERRY_DEVICE void load_residual(const Slice& slice, const float* residual, float* x) {
  constexpr ScalarType kFloat = ScalarType::kFloat32;
  const auto* array = reinterpret_cast<const std::byte*>(residual);
  if (!goes_by_quads(slice, residual)) return load_elements<kFloat>(slice, array, x);
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    const auto* p = array + slice.element(row) * sizeof(float);
    widen_quad<kFloat>(read<Quad<kFloat>>(p), x + kQuad * row);
  }
}

// Stores the lane's elements, among which is no NaN but the canonical one. Whether all of them
// arrive finite.
template <ScalarType dtype>
GRADFERRY_DEVICE bool store_slice(const Slice& slice, std::byte* array, const float* x) {
  constexpr uint32_t kItem = item_bytes(dtype);
  bool all_finite = true;
  if (!slice.is_whole()) {
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < kLaneElements; ++j) {
      const uint32_t element = slice.element(j / kQuad) + j % kQuad;
      if (element >= slice.num_elements) continue;
      all_finite = all_finite && arrives_finite<dtype>(x[j]);
      store_item<dtype>(array + element * kItem, narrow<dtype>(x[j]));
    }
    return all_finite;
  }
  const uint32_t off = items_off_quads<dtype>(array);
  Quad<dtype> row_before{};
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    std::byte* p = array + slice.element(row) * kItem;
    const bool is_finite = quad_arrives_finite<dtype>(x + kQuad * row);
    all_finite = all_finite && is_finite;
    const Quad<dtype> quad = narrow_quad<dtype>(x + kQuad * row, is_finite);
    if (off == 0) {
      write(p, quad);
      continue;
    }
    const Quad<dtype> before = from_lane_before<dtype>(slice.lane, quad, row_before);
    const Quad<dtype> in_memory = quad_across<dtype>(before, quad, kQuad - off);
    row_before = quad;
    if (row == 0 && slice.lane == 0) {
      store_items<dtype>(p - off * kItem, in_memory, off, kQuad);
    } else {
      write(p - off * kItem, in_memory);
    }
    if (row == kRows - 1 && slice.lane == kWarpLanes - 1) {
      store_items<dtype>(p, quad, kQuad - off, kQuad);
    }
  }
  return all_finite;
}

// x is +0 from the tile's end on.
GRADFERRY_DEVICE void clear_beyond_end(const Slice& slice, float* x) {
  if (slice.is_whole()) return;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) {
    if (slice.element(j / kQuad) + j % kQuad >= slice.num_elements) x[j] = 0.0f;
  }
}

// Whether all of the lane's elements are finite, and what narrow() makes of them.
template <ScalarType dtype>
GRADFERRY_DEVICE bool slice_arrives_finite(const float* x) {
  bool is_finite = true;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) is_finite = is_finite && arrives_finite<dtype>(x[j]);
  return is_finite;
}

// --- warps ---------------------------------------------------------------------------------------

// Whether the lane belongs to the upper half of each pair that `lanes`, a power of two, tells
// apart.
GRADFERRY_DEVICE bool is_upper(const Slice& slice, int lanes) {
  return (slice.lane & static_cast<uint32_t>(lanes)) != 0;
}

// One step of reducing several rows over lanes that are `lanes` apart. Lower lanes go on with the
// even rows, upper ones with the odd rows: each sends what it gives up. half[i] is row 2 i or 2 i
// + 1.
template <uint32_t kCount, typename T, typename Op>
GRADFERRY_DEVICE void halve_rows(const Slice& slice, int lanes, const T* x, T* half, Op op) {
  const bool upper = is_upper(slice, lanes);
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kCount / 2; ++i) {
    const T sent = upper ? x[2 * i] : x[2 * i + 1];
    const T kept = upper ? x[2 * i + 1] : x[2 * i];
    half[i] = op(kept, __shfl_xor_sync(kAllLanes, sent, lanes));
  }
}

// Reduces x[row] of all rows over 8 lanes, those told apart by three powers of two, the first one
// first: 7 shuffles, not 24. A lane gets the row whose bits 0, 1, 2 are its places in the pairs of
// first, second, third: with 1, 2, 4 an octet is reduced, and lane l has row l % 8.
template <typename T, typename Op>
GRADFERRY_DEVICE T rows_to_lanes(const Slice& slice, const T* x, Op op, int first = 1,
                                 int second = 2, int third = 4) {
  T half[kRows / 2], quarter[kRows / 4], result;
  halve_rows<kRows>(slice, first, x, half, op);
  halve_rows<kRows / 2>(slice, second, half, quarter, op);
  halve_rows<kRows / 4>(slice, third, quarter, &result, op);
  return result;
}

// Combines the four octets, neighbours first; every lane has the result of row lane % 8.
template <typename T, typename Op>
GRADFERRY_DEVICE T combine_octets(T x, Op op) {
  x = op(x, __shfl_xor_sync(kAllLanes, x, 8));
  return op(x, __shfl_xor_sync(kAllLanes, x, 16));
}

struct Maximum {
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return maximum(a, b); }
};
struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Or {
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a | b; }
};

// The largest of all lanes.
GRADFERRY_DEVICE uint32_t warp_maximum(uint32_t x) { return __reduce_max_sync(kAllLanes, x); }

// Largest magnitudes of the lane's quads, as bits.
GRADFERRY_DEVICE void quad_maxima(const float* x, uint32_t* largest) {
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    const float* quad = x + kQuad * row;
    largest[row] = maximum(maximum(magnitude_bits(quad[0]), magnitude_bits(quad[1])),
                           maximum(magnitude_bits(quad[2]), magnitude_bits(quad[3])));
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
