// Where a codec's decode puts numbers: it is written once and stores, streams, adds, or only looks.
// A codec gives the elements of a unit, up to its `padded`, to its sink in one of two ways:
//
//   dense    sink(i, x) for every vector: the values of elements i .. i + kLanes - 1
//   sparse   give_sparsely(sink, padded, give): zeros, but for what give(put) gives by put(i, x)
//
// Values given sparsely are never -0: skipping a zero must be the same as adding it.
#pragma once

#include "gradferry/codec.h"
#include "kernels/common/simd.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

struct StoreSink {
  float* out;
  GRADFERRY_LANE void operator()(uint32_t i, F32 x) const { store(out + i, x); }
  GRADFERRY_LANE void zeros(uint32_t count) const {
    __builtin_memset(out, 0, count * sizeof(float));
  }
  GRADFERRY_LANE void put(uint32_t i, float x) const { out[i] = x; }
};
struct StreamSink {
  float* out;
  GRADFERRY_LANE void operator()(uint32_t i, F32 x) const { stream(out + i, x); }
};
struct AddSink {
  float* out;
  GRADFERRY_LANE void operator()(uint32_t i, F32 x) const { store(out + i, load(out + i) + x); }
  GRADFERRY_LANE void zeros(uint32_t) const {}
  GRADFERRY_LANE void put(uint32_t i, float x) const { out[i] = out[i] + x; }
};
struct NullSink {
  GRADFERRY_LANE void operator()(uint32_t, F32) const {}
  GRADFERRY_LANE void zeros(uint32_t) const {}
  GRADFERRY_LANE void put(uint32_t, float) const {}
};

// One value for elements 0 .. padded.
template <typename Sink>
GRADFERRY_LANE void fill(uint32_t padded, float value, Sink sink) {
  for (uint32_t i = 0; i < padded; i += kLanes) sink(i, F32(value));
}

// A sink without put() gets whole vectors, put together in the L1 cache.
template <typename Sink, typename Give>
GRADFERRY_LANE void give_sparsely(Sink sink, uint32_t padded, Give give) {
  if constexpr (requires { sink.zeros(padded); }) {
    sink.zeros(padded);
    give([&](uint32_t i, float x) { sink.put(i, x); });
  } else {
    alignas(64) float scratch[kTileElements];
    give_sparsely(StoreSink{scratch}, padded, give);
    for (uint32_t i = 0; i < padded; i += kLanes) sink(i, load(scratch + i));
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
