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

#include "kernels/common/conversions.h"
#include "kernels/common/cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

inline constexpr uint32_t kRows = 8;
inline constexpr uint32_t kRowElements = 128;
inline constexpr uint32_t kQuad = 4;
inline constexpr uint32_t kLaneElements = kRows * kQuad;
inline constexpr uint32_t kSliceElements = kRows * kRowElements;
inline constexpr uint32_t kTileThreads = kTileElements / kLaneElements;  // 128

// For counting instructions (tools/count_sass.py): every tile is whole and aligned.
#if defined(GRADFERRY_HOT_PATH_ONLY)
inline constexpr bool kHotPathOnly = true;
#else
inline constexpr bool kHotPathOnly = false;
#endif

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

// --- quads ---------------------------------------------------------------------------------------

template <ScalarType dtype>
GRADFERRY_DEVICE float widen(uint32_t bits_of_item) {
  if constexpr (dtype == ScalarType::kFloat32) return from_bits(bits_of_item);
  if constexpr (dtype == ScalarType::kBFloat16) return bf16_to_float(bits_of_item);
  if constexpr (dtype == ScalarType::kFloat16) return fp16_to_float(bits_of_item);
}

// x, which is no NaN but the canonical one, rounded to `dtype`: the bits.
template <ScalarType dtype>
GRADFERRY_DEVICE uint32_t narrow(float x) {
  if constexpr (dtype == ScalarType::kFloat32) return bits(x);
  if constexpr (dtype == ScalarType::kBFloat16) return float_to_bf16(x);
  if constexpr (dtype == ScalarType::kFloat16) return float_to_fp16(x);
}

// Four items at an address that is a multiple of their size together.
template <ScalarType dtype>
GRADFERRY_DEVICE void load_quad(const std::byte* p, float* x) {
  if constexpr (dtype == ScalarType::kFloat32) {
    const Bytes16 quad = read<Bytes16>(p);
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) x[i] = from_bits(quad.word[i]);
  } else {
    const Bytes8 quad = read<Bytes8>(p);
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) {
      x[i] = widen<dtype>(quad.word[i / 2] >> (16 * (i % 2)) & 0xffffu);
    }
  }
}
template <ScalarType dtype>
GRADFERRY_DEVICE void store_quad(std::byte* p, const uint32_t* items) {
  if constexpr (dtype == ScalarType::kFloat32) {
    write(p, Bytes16{{items[0], items[1], items[2], items[3]}});
  } else {
    write(p, Bytes8{{items[0] | items[1] << 16, items[2] | items[3] << 16}});
  }
}
template <ScalarType dtype>
GRADFERRY_DEVICE float load_item(const std::byte* p) {
  if constexpr (dtype == ScalarType::kFloat32) return read<float>(p);
  return widen<dtype>(read<uint16_t>(p));
}
template <ScalarType dtype>
GRADFERRY_DEVICE void store_item(std::byte* p, uint32_t item) {
  if constexpr (dtype == ScalarType::kFloat32) {
    write(p, item);
  } else {
    write(p, static_cast<uint16_t>(item));
  }
}

// Whether quads of an array at p may be accessed as a whole.
template <ScalarType dtype>
GRADFERRY_DEVICE bool has_aligned_quads(const void* p) {
  if constexpr (kHotPathOnly) return true;
  return reinterpret_cast<uintptr_t>(p) % (kQuad * item_bytes(dtype)) == 0;
}

// --- slices --------------------------------------------------------------------------------------
//
// Whole slices of aligned arrays go by quads, back to back; all others element by element, which a
// warp does to the same lines.

// x = the lane's elements of a tile's array, +0 beyond its end.
template <ScalarType dtype>
GRADFERRY_DEVICE void load_slice(const Slice& slice, const std::byte* array, float* x) {
  constexpr uint32_t kItem = item_bytes(dtype);
  if (slice.is_whole() && has_aligned_quads<dtype>(array)) {
    GRADFERRY_UNROLL
    for (uint32_t row = 0; row < kRows; ++row) {
      load_quad<dtype>(array + slice.element(row) * kItem, x + kQuad * row);
    }
    return;
  }
  GRADFERRY_UNROLL
  for (uint32_t j = 0; j < kLaneElements; ++j) {
    const uint32_t element = slice.element(j / kQuad) + j % kQuad;
    x[j] = element < slice.num_elements ? load_item<dtype>(array + element * kItem) : 0.0f;
  }
}

// Calls item(j) for the bits of the lane's element j and stores them.
template <ScalarType dtype, typename Item>
GRADFERRY_DEVICE void store_slice(const Slice& slice, std::byte* array, Item item) {
  constexpr uint32_t kItem = item_bytes(dtype);
  const bool by_quads = slice.is_whole() && has_aligned_quads<dtype>(array);
  GRADFERRY_UNROLL
  for (uint32_t row = 0; row < kRows; ++row) {
    std::byte* p = array + slice.element(row) * kItem;
    uint32_t items[kQuad];
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) items[i] = item(kQuad * row + i);
    if (by_quads) {
      store_quad<dtype>(p, items);
      continue;
    }
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) {
      if (slice.element(row) + i < slice.num_elements) store_item<dtype>(p + i * kItem, items[i]);
    }
  }
}

// x is +0 from the tile's end on.
GRADFERRY_DEVICE void clear_beyond_end(const Slice& slice, float* x) {
  if (slice.is_whole()) return;
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
GRADFERRY_DEVICE uint32_t warp_maximum(uint32_t x) {
#if defined(GRADFERRY_SIMT) || __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kAllLanes, x);
#else
  GRADFERRY_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    x = maximum(x, __shfl_xor_sync(kAllLanes, x, lanes));
  }
  return x;
#endif
}

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
