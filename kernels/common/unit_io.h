// Moving up to one unit of elements between memory and fp32 scratch: widening a gradient and adding
// its residual, narrowing a result, updating residuals, checksums, zero tests.
//
// Gradients may be misaligned down to one element and end anywhere. Loops go by whole chunks of
// kChunk elements; the last, partial one takes a detour through a zero-filled local copy, so that
// nothing outside the n elements is read or written.
#pragma once

#include "gradferry/codec.h"
#include "gradferry/wire.h"
#include "kernels/common/conversions.h"
#include "kernels/common/simd.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

template <ScalarType dtype>
GRADFERRY_LANE F32 load_number(const std::byte* p) {
  if constexpr (dtype == ScalarType::kFloat32) return load(reinterpret_cast<const float*>(p));
  const auto* halfwords = reinterpret_cast<const uint16_t*>(p);
  if constexpr (dtype == ScalarType::kBFloat16) return bf16_to_float(load_halfwords(halfwords));
  if constexpr (dtype == ScalarType::kFloat16) return load_fp16(halfwords);
}

// Writes x rounded to `dtype` and returns the numbers written, as fp32.
template <ScalarType dtype>
GRADFERRY_LANE F32 store_number(std::byte* p, F32 x) {
  x = canonical(x);
  if constexpr (dtype == ScalarType::kFloat32) {
    store(reinterpret_cast<float*>(p), x);
    return x;
  }
  auto* halfwords = reinterpret_cast<uint16_t*>(p);
  if constexpr (dtype == ScalarType::kBFloat16) {
    const U32 rounded = float_to_bf16(x);
    store_halfwords(halfwords, rounded);
    return bf16_to_float(rounded);
  }
  if constexpr (dtype == ScalarType::kFloat16) {
    store_fp16(halfwords, x);
    return load_fp16(halfwords);
  }
}

// Calls body(i) for the first element i of every whole chunk of n elements, then tail(i, count).
template <typename Body, typename Tail>
GRADFERRY_LANE void for_chunks(uint32_t n, Body body, Tail tail) {
  uint32_t i = 0;
  for (; i + kChunk <= n; i += kChunk) body(i);
  if (i < n) tail(i, n - i);
}

// Addresses to prefetch while a unit is computed. A codec's loops call these functions regularly,
// to spread memory requests over the computing time: requests in bursts wait for each other, and
// memory is idle in between. Integers, not pointers: the addresses may be invalid.
struct Ahead {
  uintptr_t gradient = 0;      // of a unit that comes soon; 0: nothing is read there
  uintptr_t residual = 0;      // likewise
  uint32_t gradient_item = 0;  // bytes
  uintptr_t payload = 0;       // bytes from this tile's payload to the next one's, modulo 2^64
  uintptr_t output = 0;        // likewise, where this call writes payloads

  // Elements i .. i + 31 of the gradient and the residual.
  GRADFERRY_LANE void prefetch_32(uint32_t i) const {
    if (gradient != 0) {
      prefetch_at(gradient + i * gradient_item);
      if (gradient_item == sizeof(float)) prefetch_at(gradient + i * gradient_item + 64);
    }
    if (residual != 0) {
      prefetch_at(residual + i * sizeof(float));
      prefetch_at(residual + i * sizeof(float) + 64);
    }
  }
  // The cache line in the next tile's payload that corresponds to this one in a tile's that is read
  // or written. Payloads are too short for a hardware prefetcher, and there may be many.
  GRADFERRY_LANE void prefetch_payload(const std::byte* p) const {
    prefetch_at(reinterpret_cast<uintptr_t>(p) + payload);
  }
  GRADFERRY_LANE void prefetch_output(const std::byte* p) const {
    prefetch_at(reinterpret_cast<uintptr_t>(p) + output);
  }

 private:
  GRADFERRY_LANE static void prefetch_at(uintptr_t address) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): never read through
    prefetch(reinterpret_cast<const void*>(address));
  }
};

// v = alpha * gradient + gain * residual, zeros from n up to `padded`. residual null: alpha *
// gradient.
template <ScalarType dtype, bool kResidual, bool kPrefetch>
void load_unit(const std::byte* gradient, uint32_t n, float alpha, const float* residual,
               float gain, Ahead ahead, float* v, uint32_t padded) {
  constexpr uint32_t kItem = item_bytes(dtype);
  const F32 a(alpha), b(gain);
  const auto combine = [&](const std::byte* g, const float* r, float* out) {
    for (uint32_t l = 0; l < kChunk; l += kLanes) {
      F32 x = a * load_number<dtype>(g + l * kItem);
      if constexpr (kResidual) x = x + b * load(r + l);
      store(out + l, x);
    }
  };
  for_chunks(
      n,
      [&](uint32_t i) {
        if (kPrefetch && i % 32 == 0) ahead.prefetch_32(i);
        combine(gradient + i * kItem, kResidual ? residual + i : nullptr, v + i);
      },
      [&](uint32_t i, uint32_t count) {
        alignas(64) std::byte g[kChunk * kItem] = {};
        alignas(64) float r[kChunk] = {};
        __builtin_memcpy(g, gradient + i * kItem, count * kItem);
        if constexpr (kResidual) __builtin_memcpy(r, residual + i, count * sizeof(float));
        combine(g, r, v + i);
      });
  for (uint32_t i = n; i < padded; ++i) v[i] = 0.0f;
}

// Rounds n numbers to `dtype`. Returns kTileNonFinite if one that was written is not finite.
template <ScalarType dtype>
uint32_t store_unit(const float* v, uint32_t n, std::byte* out) {
  constexpr uint32_t kItem = item_bytes(dtype);
  U32 largest(0u);
  const auto narrow = [&](const float* x, std::byte* p) {
    for (uint32_t l = 0; l < kChunk; l += kLanes) {
      largest = maximum(largest, magnitude_bits(store_number<dtype>(p + l * kItem, load(x + l))));
    }
  };
  for_chunks(
      n, [&](uint32_t i) { narrow(v + i, out + i * kItem); },
      [&](uint32_t i, uint32_t count) {
        alignas(64) float x[kChunk] = {};
        alignas(64) std::byte p[kChunk * kItem];
        __builtin_memcpy(x, v + i, count * sizeof(float));
        narrow(x, p);
        __builtin_memcpy(out + i * kItem, p, count * kItem);
      });
  return reduce_maximum(largest) >= kInfinityBits ? kTileNonFinite : 0;
}

// residual = update(i, old residual) for i in 0..n, where that is finite: a residual never becomes
// anything else. update sees whole chunks and must be able to read kChunk elements from any i < n.
template <typename Update>
GRADFERRY_LANE void update_residual(float* residual, uint32_t n, Update update) {
  const auto apply = [&](uint32_t i, float* r) {
    for (uint32_t l = 0; l < kChunk; l += kLanes) {
      const F32 old = load(r + l);
      const F32 updated = update(i + l, old);
      store(r + l, select(is_not_finite(updated), old, updated));
    }
  };
  for_chunks(
      n, [&](uint32_t i) { apply(i, residual + i); },
      [&](uint32_t i, uint32_t count) {
        alignas(64) float r[kChunk] = {};
        __builtin_memcpy(r, residual + i, count * sizeof(float));
        apply(i, r);
        __builtin_memcpy(residual + i, r, count * sizeof(float));
      });
}

// Converts a residual to the units of a new gradient, for elements that the codec then keeps. Call
// it after v was computed from the old residual. residual may be null.
inline void rescale_residual(float* residual, uint32_t n, float gain) {
  if (residual == nullptr || gain == 1.0f) return;
  const F32 factor(gain);
  update_residual(residual, n, [&](uint32_t, F32 old) { return factor * old; });
}

// Payloads are summed by vectors of 64-bit pairs of words.
constexpr uint32_t kPairs = kLanes < 4 ? 2 : kLanes / 2;
using Pairs [[gnu::vector_size(8 * kPairs)]] = uint64_t;

// word_sum() of wire.h, modulo 2^64 in every step. Running sums replace the multiplications: after
// K vectors x_k, `sum` = x_0 + .. + x_(K-1) and `sums` = K x_0 + (K-1) x_1 + .. + 1 x_(K-1); `high`
// and `highs` are the same of the upper words. A pair is low + 2^32 high: so the sum of both words
// is sum + high - 2^32 high.
inline uint64_t payload_checksum(const std::byte* payload, uint32_t num_bytes,
                                 uint32_t message_offset) {
  const auto num_vectors = static_cast<uint32_t>(num_bytes / sizeof(Pairs));
  Pairs sum{}, sums{}, high{}, highs{};
  for (uint32_t k = 0; k < num_vectors; ++k) {
    Pairs x;
    __builtin_memcpy(&x, payload + k * sizeof(Pairs), sizeof(x));
    sum += x;
    sums += sum;
    high += x >> 32;
    highs += high;
  }
  const Pairs both = sum + high - (high << 32);
  const Pairs by_vector = num_vectors * both - (sums + highs - (highs << 32));  // of k x_k
  const uint64_t first_weight = message_offset / 2 + kFirstWeight;
  uint64_t result = 0;
  for (uint32_t l = 0; l < kPairs; ++l) {
    result += 4 * kPairs * by_vector[l] + (first_weight + 4 * l) * both[l] + 2 * high[l];
  }
  for (uint32_t i = num_vectors * 2 * kPairs; i < num_bytes / 4; ++i) {
    uint32_t word;
    __builtin_memcpy(&word, payload + 4 * i, sizeof(word));
    result += word * (first_weight + 2 * i);
  }
  return result;
}

// Whether all bits under `mask`, repeated every 8 bytes, are zero. Ends at the first that is not.
inline bool all_zero(const std::byte* p, uint32_t num_bytes, uint64_t mask) {
  uint32_t i = 0;
  for (; i + 64 <= num_bytes; i += 64) {
    uint64_t words[8];
    __builtin_memcpy(words, p + i, sizeof(words));
    uint64_t found = 0;
    for (const uint64_t word : words) found |= word;
    if ((found & mask) != 0) return false;
  }
  uint64_t rest[8] = {};
  __builtin_memcpy(rest, p + i, num_bytes - i);
  uint64_t found = 0;
  for (const uint64_t word : rest) found |= word;
  return (found & mask) == 0;
}

// Everything but the signs of numbers of a dtype, for all_zero.
constexpr uint64_t magnitude_mask(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat64: return 0x7fffffffffffffffu;
    case ScalarType::kFloat32: return 0x7fffffff7fffffffu;
    default: return 0x7fff7fff7fff7fffu;
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
