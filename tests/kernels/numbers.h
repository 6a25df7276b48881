// Number formats re-derived with plain double arithmetic: shares nothing with the kernels.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "gradferry/codec.h"

namespace gradferry::testing {

inline uint32_t float_bits(float x) { return std::bit_cast<uint32_t>(x); }

inline double fp16_value(uint16_t x) {
  const int exponent = (x >> 10) & 31;
  const double fraction = x & 1023;
  const double sign = (x & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return fraction == 0 ? sign * INFINITY : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

inline float bf16_value(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// Rounds to a format with `digits` significant bits and smallest normal exponent `minimum`, to
// nearest, ties to even; magnitudes over `largest` become infinite.
inline double round_to_format(double x, int digits, int minimum, double largest) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int place = std::max(std::ilogb(x), minimum) - (digits - 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -place)), place);
  return std::fabs(rounded) > largest ? std::copysign(INFINITY, x) : rounded;
}

inline uint16_t fp16_bits(double x) {
  if (std::isnan(x)) return 0x7e00;
  const double rounded = round_to_format(x, 11, -14, 65504.0);
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(rounded);
  if (std::isinf(magnitude)) return sign | 0x7c00;
  if (magnitude < 0x1p-14) return sign | static_cast<uint16_t>(std::ldexp(magnitude, 24));
  const int exponent = std::ilogb(magnitude);
  const double fraction = std::ldexp(magnitude, 10 - exponent) - 1024;
  return sign | static_cast<uint16_t>(((exponent + 15) << 10) + static_cast<int>(fraction));
}

inline uint16_t bf16_bits(float x) {
  if (std::isnan(x)) return 0x7fc0;
  const double rounded = round_to_format(x, 8, -126, 0x1.fep127);
  return static_cast<uint16_t>(float_bits(static_cast<float>(rounded)) >> 16);
}

// One number of a gradient, as double (exact for every dtype).
inline double read_number(ScalarType dtype, const void* p) {
  uint16_t half;
  float single;
  double number;
  switch (dtype) {
    case ScalarType::kFloat64: std::memcpy(&number, p, 8); return number;
    case ScalarType::kFloat32: std::memcpy(&single, p, 4); return single;
    case ScalarType::kBFloat16: std::memcpy(&half, p, 2); return bf16_value(half);
    default: std::memcpy(&half, p, 2); return fp16_value(half);
  }
}

// Rounds x to a dtype with the canonical NaN.
inline void write_number(ScalarType dtype, double x, void* p) {
  const uint64_t nan64 = 0x7ff8000000000000u;
  const uint32_t nan32 = 0x7fc00000u;
  const float single = static_cast<float>(x);
  const uint16_t half = dtype == ScalarType::kBFloat16 ? bf16_bits(single) : fp16_bits(x);
  switch (dtype) {
    case ScalarType::kFloat64: std::memcpy(p, std::isnan(x) ? (const void*)&nan64 : &x, 8); break;
    case ScalarType::kFloat32:
      std::memcpy(p, std::isnan(x) ? (const void*)&nan32 : &single, 4);
      break;
    default: std::memcpy(p, &half, 2);
  }
}

}  // namespace gradferry::testing
