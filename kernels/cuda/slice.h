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
inline constexpr uint32_t kTileWarps = kTileThreads / kWarpLanes;

struct Slice {
  uint32_t num_elements;  // of the tile
  uint32_t warp;
  uint32_t lane;
  uint32_t first;   // element of the lane's quad in row 0
  uint32_t stride;  // from row to row

  // by_blocks: four lanes have a block of 128 for themselves; element 1024 * warp + 128 * b + 16 *
  // row + 4 * q + i is x[4 * row + i] of lane 4 * b + q.
  GRADFERRY_DEVICE explicit Slice(uint32_t tile_elements, bool by_blocks = false)
      : Slice(tile_elements, by_blocks, fresh(threadIdx.x)) {}

  GRADFERRY_DEVICE uint32_t element(uint32_t row) const { return first + row * stride; }
  // The same for all lanes of a warp:
  GRADFERRY_DEVICE uint32_t begin() const { return warp * kSliceElements; }
  GRADFERRY_DEVICE bool is_empty() const { return begin() >= num_elements; }
  GRADFERRY_DEVICE bool is_whole() const { return begin() + kSliceElements <= num_elements; }
  // Whether it is whole, and memory's quads are the lanes'.
  template <ScalarType dtype>
  GRADFERRY_DEVICE bool goes_by_quads(const std::byte* array) const {
    return is_whole() && items_off_quads<dtype>(array) == 0;
  }

 private:
  GRADFERRY_DEVICE Slice(uint32_t tile_elements, bool by_blocks, uint32_t thread)
      : num_elements(tile_elements),
        warp(thread / kWarpLanes),
        lane(thread % kWarpLanes),
        first(begin() + (by_blocks ? lane / 4 * kRowElements + lane % 4 * kQuad : lane * kQuad)),
        stride(by_blocks ? 4 * kQuad : kRowElements) {}
};

// --- slices --------------------------------------------------------------------------------------
//
// Slices go by quads where they can. Others go element by element, neighbours at once, and in
// shared memory from where they lie to the lanes that have them, or back.

// Whether all of the lane's elements are finite, and what narrow() makes of them.
template <ScalarType dtype>
GRADFERRY_DEVICE bool slice_arrives_finite(const float* x) {
  bool is_finite = true;
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) is_finite = is_finite && arrives_finite<dtype>(x[j]);
  return is_finite;
}

// The lane's quads of a whole slice, where memory's are the lanes'.
template <ScalarType dtype>
GRADFERRY_DEVICE void load_quads(const Slice& slice, const std::byte* array, float* x) {
  Quad<dtype> quads[kRows];
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    quads[row] = read<Quad<dtype>>(array + slice.element(row) * item_bytes(dtype));
  }
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) widen_quad<dtype>(quads[row], x + kQuad * row);
}
template <ScalarType dtype>
GRADFERRY_DEVICE void store_quads(const Slice& slice, std::byte* array, const float* x) {
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    write(array + slice.element(row) * item_bytes(dtype),
          narrow_quad<dtype>(x + kQuad * row, true));
  }
}

// Calls f(element, its place in shared memory, which holds the lane's x by then) for all of a
// slice.
template <typename F>
GRADFERRY_DEVICE void for_elements(const Slice& slice, const float* x, F f) {
  rare_path();
  auto* array = reinterpret_cast<std::byte*>(scratch());
  __syncwarp();
  store_quads<ScalarType::kFloat32>(slice, array, x);
  __syncwarp();
  const uint32_t begin = slice.begin() + slice.lane;
#pragma unroll 4
  for (uint32_t i = 0; i < kSliceElements; i += kWarpLanes) {
    if (begin + i < slice.num_elements) f(begin + i, scratch()[begin + i]);
  }
  __syncwarp();
}

// x = the lane's elements of a tile's array, +0 beyond its end.
template <ScalarType dtype>
GRADFERRY_DEVICE void load_slice(const Slice& slice, const std::byte* array, float* x) {
  if (slice.goes_by_quads<dtype>(array)) return load_quads<dtype>(slice, array, x);
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) x[j] = 0.0f;
  for_elements(slice, x, [&](uint32_t i, float& place) {
    place = load_item<dtype>(array + i * item_bytes(dtype));
  });
  load_quads<ScalarType::kFloat32>(slice, reinterpret_cast<std::byte*>(scratch()), x);
  __syncwarp();
}

// Stores the lane's elements, among which is no NaN but the canonical one. Whether all of them
// arrive finite.
template <ScalarType dtype>
GRADFERRY_DEVICE bool store_slice(const Slice& slice, std::byte* array, const float* x) {
  const bool is_finite = slice_arrives_finite<dtype>(x);
  // Of fp32 the bits are what they are.
  const bool by_quads = dtype == ScalarType::kFloat32 || __all_sync(kAllLanes, is_finite ? 1 : 0);
  if (by_quads && slice.goes_by_quads<dtype>(array)) {
    store_quads<dtype>(slice, array, x);
  } else {
    for_elements(slice, x, [&](uint32_t i, float y) {
      store_item<dtype>(array + i * item_bytes(dtype), narrow<dtype>(y));
    });
  }
  return is_finite;
}

// x is +0 from the tile's end on.
GRADFERRY_DEVICE void clear_beyond_end(const Slice& slice, float* x) {
  if (slice.is_whole()) return;
  rare_path();
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) {
    if (slice.element(j / kQuad) + j % kQuad >= slice.num_elements) x[j] = 0.0f;
  }
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

// Reduces x[row] of all rows over the 8 lanes of an octet: 7 shuffles, not 24. Lane l gets row l
// % 8.
template <typename T, typename Op>
GRADFERRY_DEVICE T rows_to_lanes(const Slice& slice, const T* x, Op op) {
  T half[kRows / 2], quarter[kRows / 4], result;
  halve_rows<kRows>(slice, 1, x, half, op);
  halve_rows<kRows / 2>(slice, 2, half, quarter, op);
  halve_rows<kRows / 4>(slice, 4, quarter, &result, op);
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
