// The values section of a topk payload on CPU: bf16, or one group of kernels/common/e2m1.h.
#pragma once

#include "kernels/common/simd.h"
#include "kernels/topk/topk_layout.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk {

// Size of arrays of kept values: whole vectors and blocks fit behind the last one.
inline constexpr uint32_t kValuesRoom = kMostKept + 2 * e2m1::kBlock;

// All of these take or give arrays of kValuesRoom floats, of which k count. What is encoded is
// followed by zeros up to a whole block; `withheld` becomes what decoding does not give back.

inline void encode_bf16(const float* values, uint32_t k, std::byte* out, float* withheld) {
  alignas(64) uint16_t halfwords[kValuesRoom];
  for (uint32_t i = 0; i < k; i += kLanes) {
    const F32 x = load(values + i);
    const U32 rounded = encode_value(x);
    store_halfwords(halfwords + i, rounded);
    store(withheld + i, x - bf16_to_float(rounded));
  }
  __builtin_memcpy(out, halfwords, 2 * k);
}

// Returns whether all values are finite.
inline bool decode_bf16(const std::byte* in, uint32_t k, float* values) {
  alignas(64) uint16_t halfwords[kValuesRoom];
  __builtin_memcpy(halfwords, in, 2 * k);
  for (uint32_t i = k; i < round_up(k, kLanes); ++i) halfwords[i] = 0;
  U32 largest(0u);
  for (uint32_t i = 0; i < k; i += kLanes) {
    const F32 x = bf16_to_float(load_halfwords(halfwords + i));
    largest = maximum(largest, magnitude_bits(x));
    store(values + i, unsigned_zero(x));
  }
  return reduce_maximum(largest) < kInfinityBits;
}

GRADFERRY_LANE uint32_t largest_magnitude(const float* values, uint32_t count) {
  U32 largest(0u);
  for (uint32_t i = 0; i < count; i += kLanes) {
    largest = maximum(largest, magnitude_bits(load(values + i)));
  }
  return reduce_maximum(largest);
}

// The values are finite.
inline void encode_e2m1(const float* values, uint32_t k, std::byte* out, float* withheld) {
  constexpr uint32_t kBlock = e2m1::kBlock, kHalfBlock = e2m1::kHalfBlock;
  const uint32_t blocks = num_blocks(k);
  const int32_t exponent = e2m1::group_exponent(largest_magnitude(values, blocks * kBlock));
  std::byte codes[kMostKept / 2];
  std::byte* scales = out + code_bytes(k);
  uint32_t any_scale = 0;
  for (uint32_t block = 0; block < blocks; ++block) {
    const float* v = values + block * kBlock;
    const e2m1::BlockScale<float> scale =
        e2m1::block_scale(from_bits(largest_magnitude(v, kBlock)), exponent);
    any_scale |= scale.code;
    scales[block] = std::byte(scale.code);
    alignas(64) float doubled[kBlock];
    for (uint32_t i = 0; i < kBlock; i += kLanes) {
      const F32 x = load(v + i);
      const F32 nearest = e2m1::nearest_doubled(x, F32(scale.reciprocal));
      store(doubled + i, nearest);
      store(withheld + block * kBlock + i, x - nearest * F32(scale.half_scale));
    }
    const auto code = [&](uint32_t i) {
      return e2m1::kCodeOfDoubled[static_cast<int32_t>(doubled[i]) & 31];
    };
    for (uint32_t j = 0; j < kHalfBlock; ++j) {
      codes[block * kHalfBlock + j] = std::byte(code(j) | code(j + kHalfBlock) << 4);
    }
  }
  __builtin_memcpy(out, codes, code_bytes(k));
  scales[blocks] = std::byte(any_scale == 0 ? 0 : exponent + e2m1::kExponentBias);
}

// Returns whether exponent and scales are those of a finite group.
inline bool decode_e2m1(const std::byte* in, uint32_t k, float* values) {
  constexpr uint32_t kHalfBlock = e2m1::kHalfBlock;
  const uint32_t blocks = num_blocks(k);
  uint8_t codes[kMostKept / 2];
  __builtin_memcpy(codes, in, code_bytes(k));
  __builtin_memset(codes + code_bytes(k), 0, blocks * kHalfBlock - code_bytes(k));
  const std::byte* scales = in + code_bytes(k);
  const uint32_t exponent_byte = static_cast<uint32_t>(scales[blocks]);
  const int32_t exponent = static_cast<int32_t>(exponent_byte) - e2m1::kExponentBias;
  bool valid = exponent_byte == 0 ||
               (exponent >= e2m1::kSmallestExponent && exponent <= e2m1::kLargestExponent);
  const uint32_t most = exponent_byte == 0                   ? 0
                        : exponent == e2m1::kLargestExponent ? e2m1::kCappedScaleCode
                                                             : e2m1::kLargestScaleCode;
  const SignedTable8 table(e2m1::kCodeValues);
  for (uint32_t block = 0; block < blocks; ++block) {
    const uint32_t scale = static_cast<uint32_t>(scales[block]);
    valid &= scale == 0 || (scale >= e2m1::kSmallestScaleCode && scale <= most);
    const ScaledTable8 scaled = table * F32(valid ? e2m1::decode_scale(scale, exponent) : 0.0f);
    for (uint32_t j = 0; j < kHalfBlock; j += kLanes) {
      const U32 pair = load_bytes(codes + block * kHalfBlock + j);
      float* x = values + block * e2m1::kBlock + j;
      store(x, unsigned_zero(lookup(scaled, pair)));
      store(x + kHalfBlock, unsigned_zero(lookup(scaled, pair >> 4)));
    }
  }
  return valid;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::topk
