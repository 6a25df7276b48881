// Quads: four neighbours of an array, which a lane reads, converts and writes together.
//
// 16-bit numbers are converted by the processor's own instructions, two at once. They round as
// float_to_bf16() and float_to_fp16() do, but make NaNs of other bits than the canonical one: what
// holds a NaN, or a number that narrow() makes infinite, goes item by item.
#pragma once

#include <type_traits>

#include "kernels/common/conversions.h"
#include "kernels/cuda/cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

inline constexpr uint32_t kQuad = 4;

template <ScalarType dtype>
using Quad = std::conditional_t<dtype == ScalarType::kFloat32, Bytes16, Bytes8>;

// --- items ---------------------------------------------------------------------------------------

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

// The bits of the least number that narrow() makes infinite: halfway from the largest finite number
// to the next power of two, a tie that goes to the even one.
template <ScalarType dtype>
inline constexpr uint32_t kLeastInfinite = dtype == ScalarType::kFloat16    ? 0x477ff000u
                                           : dtype == ScalarType::kBFloat16 ? 0x7f7f8000u
                                                                            : kInfinityBits;

// Whether x is finite, and what narrow() makes of it.
template <ScalarType dtype>
GRADFERRY_DEVICE bool arrives_finite(float x) {
  return __builtin_fabsf(x) < from_bits(kLeastInfinite<dtype>);
}

template <ScalarType dtype>
GRADFERRY_DEVICE uint32_t read_item(const std::byte* p) {
  if constexpr (dtype == ScalarType::kFloat32) return read<uint32_t>(p);
  return read<uint16_t>(p);
}
template <ScalarType dtype>
GRADFERRY_DEVICE float load_item(const std::byte* p) {
  return widen<dtype>(read_item<dtype>(p));
}
template <ScalarType dtype>
GRADFERRY_DEVICE void store_item(std::byte* p, uint32_t item) {
  if constexpr (dtype == ScalarType::kFloat32) {
    write(p, item);
  } else {
    write(p, static_cast<uint16_t>(item));
  }
}

// --- conversions ---------------------------------------------------------------------------------

// Inputs must be finite after rounding to `dtype`.
template <ScalarType dtype>
GRADFERRY_DEVICE uint32_t narrow_pair(float low, float high) {
  uint32_t pair;
  if constexpr (dtype == ScalarType::kBFloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}
// A NaN stays one.
template <ScalarType dtype>
GRADFERRY_DEVICE void widen_pair(uint32_t pair, float* x) {
  if constexpr (dtype == ScalarType::kBFloat16) {
    x[0] = from_bits(pair << 16);
    x[1] = from_bits(pair & 0xffff0000u);
  } else {
    asm("{\n"
        ".reg .f16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}"
        : "=f"(x[0]), "=f"(x[1])
        : "r"(pair));
  }
}

template <ScalarType dtype>
GRADFERRY_DEVICE bool quad_arrives_finite(const float* x) {
  return arrives_finite<dtype>(x[0]) && arrives_finite<dtype>(x[1]) &&
         arrives_finite<dtype>(x[2]) && arrives_finite<dtype>(x[3]);
}

// Packs four items that narrow() gave.
template <ScalarType dtype>
GRADFERRY_DEVICE Quad<dtype> pack_quad(const uint32_t* items) {
  if constexpr (dtype == ScalarType::kFloat32) {
    return {{items[0], items[1], items[2], items[3]}};
  } else {
    return {{items[0] | items[1] << 16, items[2] | items[3] << 16}};
  }
}
template <ScalarType dtype>
GRADFERRY_DEVICE uint32_t item_of(const Quad<dtype>& quad, uint32_t i) {
  if constexpr (dtype == ScalarType::kFloat32) return quad.word[i];
  return quad.word[i / 2] >> (16 * (i % 2)) & 0xffffu;
}

// Inputs may hold no NaN but the canonical one. is_finite: quad_arrives_finite<dtype>(x).
template <ScalarType dtype>
GRADFERRY_DEVICE Quad<dtype> narrow_quad(const float* x, bool is_finite) {
  if constexpr (dtype == ScalarType::kFloat32) {
    return {{bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3])}};
  } else {
    if (is_finite) {
      return {{narrow_pair<dtype>(x[0], x[1]), narrow_pair<dtype>(x[2], x[3])}};
    }
    rare_path();
    uint32_t items[kQuad];
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) items[i] = narrow<dtype>(x[i]);
    return pack_quad<dtype>(items);
  }
}
// A NaN stays one.
template <ScalarType dtype>
GRADFERRY_DEVICE void widen_quad(const Quad<dtype>& quad, float* x) {
  if constexpr (dtype == ScalarType::kFloat32) {
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) x[i] = from_bits(quad.word[i]);
  } else {
    widen_pair<dtype>(quad.word[0], x);
    widen_pair<dtype>(quad.word[1], x + 2);
  }
}

// --- alignment -----------------------------------------------------------------------------------

// How many items p lies behind an address that quads may have.
template <ScalarType dtype>
GRADFERRY_DEVICE uint32_t items_off_quads(const void* p) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) / item_bytes(dtype) % kQuad;
}

// Items begin .. end - 1 of a quad at p, one by one; the others are 0.
template <ScalarType dtype>
GRADFERRY_DEVICE Quad<dtype> load_items(const std::byte* p, uint32_t begin, uint32_t end) {
  uint32_t items[kQuad];
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kQuad; ++i) {
    const bool is_inside = i >= begin && i < end;
    items[i] = is_inside ? read_item<dtype>(p + i * item_bytes(dtype)) : 0;
  }
  return pack_quad<dtype>(items);
}
template <ScalarType dtype>
GRADFERRY_DEVICE void store_items(std::byte* p, const Quad<dtype>& quad, uint32_t begin,
                                  uint32_t end) {
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kQuad; ++i) {
    const bool is_inside = i >= begin && i < end;
    if (is_inside) store_item<dtype>(p + i * item_bytes(dtype), item_of<dtype>(quad, i));
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
