// The "vectors" of the scalar kernels: plain float and uint32_t. See simd.h.
#pragma once

#include "kernels/common/conversions.h"
#include "kernels/common/lane.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

using F32 = float;
using U32 = uint32_t;
using Mask = bool;
inline constexpr uint32_t kLanes = 1;

GRADFERRY_LANE bool all(Mask m) { return m; }

GRADFERRY_LANE uint32_t reduce_maximum(U32 x) { return x; }
GRADFERRY_LANE U32 lane_maxima(const U32 (&x)[kLanes]) { return x[0]; }

// Payload bytes are read and written as several types, so every access is a copy.
template <typename T>
GRADFERRY_LANE T load_as(const void* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof(T));
  return value;
}
template <typename T>
GRADFERRY_LANE void store_as(void* p, T value) {
  __builtin_memcpy(p, &value, sizeof(T));
}

GRADFERRY_LANE F32 load(const float* p) { return load_as<float>(p); }
GRADFERRY_LANE U32 load(const uint32_t* p) { return load_as<uint32_t>(p); }
GRADFERRY_LANE void store(float* p, F32 x) { store_as<float>(p, x); }
GRADFERRY_LANE void store(uint32_t* p, U32 x) { store_as<uint32_t>(p, x); }
GRADFERRY_LANE void stream(float* p, F32 x) { store_as<float>(p, x); }
GRADFERRY_LANE void finish_streams() {}

GRADFERRY_LANE U32 load_bytes(const uint8_t* p) { return *p; }
GRADFERRY_LANE U32 load_halfwords(const uint16_t* p) { return load_as<uint16_t>(p); }
GRADFERRY_LANE F32 load_signed_bytes(const int8_t* p) { return static_cast<float>(*p); }
GRADFERRY_LANE bool has_byte(const void* p, uint32_t num_bytes, uint8_t byte) {
  const auto* bytes = static_cast<const uint8_t*>(p);
  bool found = false;
  for (uint32_t i = 0; i < num_bytes; ++i) found |= bytes[i] == byte;
  return found;
}
GRADFERRY_LANE void store_bytes(uint8_t* p, U32 x) { *p = static_cast<uint8_t>(x); }
GRADFERRY_LANE void store_halfwords(uint16_t* p, U32 x) {
  store_as<uint16_t>(p, static_cast<uint16_t>(x));
}
GRADFERRY_LANE F32 load_fp16(const uint16_t* p) { return fp16_to_float(load_as<uint16_t>(p)); }
GRADFERRY_LANE void store_fp16(uint16_t* p, F32 x) {
  store_as<uint16_t>(p, static_cast<uint16_t>(float_to_fp16(x)));
}

struct Table16 {
  const float* values;
  explicit Table16(const float* table) : values(table) {}
};
GRADFERRY_LANE F32 lookup(const Table16& table, U32 index) { return table.values[index & 15]; }

struct Table8 {
  float values[8];
  GRADFERRY_LANE explicit Table8(const float* table) {
    __builtin_memcpy(values, table, sizeof(values));
  }
};
GRADFERRY_LANE F32 lookup(const Table8& table, U32 index) { return table.values[index & 7]; }
GRADFERRY_LANE Table8 scaled(Table8 table, float factor) {
  for (float& x : table.values) x = x * factor;
  return table;
}

struct SignedTable8 {
  const float* values;
  float factor = 1.0f;
  explicit SignedTable8(const float* table) : values(table) {}
};
using ScaledTable8 = SignedTable8;
GRADFERRY_LANE ScaledTable8 operator*(SignedTable8 table, F32 factor) {
  table.factor *= factor;
  return table;
}
GRADFERRY_LANE F32 lookup(const ScaledTable8& table, U32 index) {
  const float magnitude = table.values[index & 7] * table.factor;
  return from_bits(bits(magnitude) | ((index & 8) << 28));
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
