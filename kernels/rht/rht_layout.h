// rht: a seeded random Hadamard transform over blocks of 128 elements, codes of 4, 3 or 2 bits, a
// least-squares scale per block. The byte format and arithmetic of docs/reference/wire_format.md,
// section "rht", once for every target.
//
// Random signs and a Walsh-Hadamard transform make the coordinates of any block look Gaussian, so
// that one Lloyd-Max codebook fits all data (DRIVE: Vargaftik et al., NeurIPS 2021; for weights,
// QuIP#: Tseng et al., ICML 2024). With c the codebook's values for the coordinates z, the scale
// <z, c> / <c, c> has the least squared error (EDEN: Vargaftik et al., ICML 2022).
//
// Codebook values are integers of at most 7 bits, Lloyd-Max up to a factor that the scale absorbs
// (the error is 0.05 % above the optimum with 4 bits, less with 3 and 2). So the transform back is
// a sum of 128 integers below 2^14, and its product with a scale of 8 significant bits is exact:
// no order of additions, no fused multiply-add and no width of integers can make decoded values
// differ between targets.
#pragma once

#include "kernels/common/codec_parts.h"
#include "kernels/common/conversions.h"
#include "kernels/common/philox.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht {

inline constexpr uint32_t kBlock = 128;
inline constexpr uint32_t kGroup = 32;  // coordinates are reordered within groups of this
inline constexpr uint32_t kTileBlocks = kTileElements / kBlock;

// Parsed options of a codec string.
struct Options {
  uint32_t bits;  // 4, 3 or 2
};

// Scales of blocks that are neither zero nor not finite, as fp32 bits of bf16 numbers.
inline constexpr uint32_t kSmallestScale = 0x00800000u;
inline constexpr uint32_t kLargestScale = 0x7f7f0000u;
inline constexpr uint32_t kOverflowingScale = 0x78000000u;  // 2^113: below, every product is finite

// Between these sums of squares a block is transformed as it is; otherwise it is first multiplied
// by a power of two.
inline constexpr float kSmallestPlainEnergy = 0x1p-100f;
inline constexpr float kLargestPlainEnergy = 0x1p100f;

// From this exponent on, decoded values and residuals can overflow.
inline constexpr int32_t kHugeExponent = 120;

GRADFERRY_LANE uint32_t num_blocks(uint32_t num_elements) {
  return (num_elements + kBlock - 1) / kBlock;
}
GRADFERRY_LANE uint32_t code_bytes(uint32_t bits) { return kBlock / 8 * bits; }  // of a block
GRADFERRY_LANE uint32_t scales_offset(uint32_t num_elements, uint32_t bits) {
  return code_bytes(bits) * num_blocks(num_elements);
}
GRADFERRY_LANE uint32_t payload_bytes(uint32_t num_elements, const Options& options) {
  return round_up(scales_offset(num_elements, options.bits) + 2 * num_blocks(num_elements),
                  kPayloadAlignment);
}
inline uint32_t payload_bytes(uint32_t num_elements, ScalarType, Stage,
                              const CodecOptions& options) {
  return payload_bytes(num_elements, options.as<Options>());
}

// Bit i mod 32 of word i / 32 flips the sign of element i of a block. `first` is the lowest of the
// numbers of the vector's blocks in the model, those of a tile being 32 * id .. 32 * id + 31.
template <typename U>
GRADFERRY_LANE PhiloxCounter<U> random_signs(uint64_t seed, uint64_t step, uint64_t first, U lane) {
  return philox(
      PhiloxCounter<U>{{U(static_cast<uint32_t>(first)) + lane,
                        U(static_cast<uint32_t>(first >> 32)), U(static_cast<uint32_t>(step)),
                        U(static_cast<uint32_t>(step >> 32))}},
      seed);
}

template <typename F>
GRADFERRY_LANE void butterfly(F& a, F& b) {
  const F sum = a + b;
  b = a - b;
  a = sum;
}

// Strides 16, 32, 64 over elements that lie 16 apart.
template <typename F>
GRADFERRY_LANE void butterfly_columns(F* x) {
  butterfly(x[0], x[1]), butterfly(x[2], x[3]), butterfly(x[4], x[5]), butterfly(x[6], x[7]);
  butterfly(x[0], x[2]), butterfly(x[1], x[3]), butterfly(x[4], x[6]), butterfly(x[5], x[7]);
  butterfly(x[0], x[4]), butterfly(x[1], x[5]), butterfly(x[2], x[6]), butterfly(x[3], x[7]);
}

// Magnitudes of the codebook, and where the code changes, in units of the root mean square: halfway
// between neighbours. Repeated, so that three bits of which the upper ones are anything can index.
template <uint32_t kBits>
struct Codebook;
template <>
struct Codebook<4> {
  static constexpr float kMagnitudes[8] = {5, 15, 25, 36, 48, 62, 79, 104};
  static constexpr float kCuts[8] = {0x1.0c76a8p-2f, 0x1.0c76a8p-1f, 0x1.996826p-1f, 0x1.19e2fcp+0f,
                                     0x1.712326p+0f, 0x1.d92abap+0f, 0x1.330e1cp+1f, 0.0f};
};
template <>
struct Codebook<3> {
  static constexpr float kMagnitudes[8] = {10, 31, 55, 88, 10, 31, 55, 88};
  static constexpr float kCuts[8] = {0x1.009630p-1f, 0x1.0d1a64p+0f, 0x1.bf764ep+0f};
};
template <>
struct Codebook<2> {
  static constexpr float kMagnitudes[8] = {3, 10, 3, 10, 3, 10, 3, 10};
  static constexpr float kCuts[8] = {0x1.f6a4f8p-1f};
};

// The index of each of kCount magnitudes: how many cuts lie below it. `cuts` are a block's, in a
// table of 8, and `cut` is the same table as vectors. A binary search is a chain of dependent
// steps: each step is taken for all magnitudes before the next.
template <uint32_t kBits, uint32_t kCount, typename F, typename Table>
GRADFERRY_LANE void magnitude_indices(const F* magnitude, const F* cut, const Table& cuts,
                                      BitsOf<F>* index) {
  using U = BitsOf<F>;
  constexpr uint32_t kMiddle = (1u << (kBits - 2)) - 1;
  F next[kCount];
  for (uint32_t i = 0; i < kCount; ++i) {
    const auto upper = magnitude[i] > cut[kMiddle];
    index[i] = or_where(upper, U(0u), U(kMiddle + 1));
    if constexpr (kBits == 4) next[i] = select(upper, cut[5], cut[1]);
    if constexpr (kBits == 3) next[i] = select(upper, cut[2], cut[0]);
  }
  if constexpr (kBits == 4) {
    for (uint32_t i = 0; i < kCount; ++i) {
      index[i] = or_where(magnitude[i] > next[i], index[i], U(2u));
    }
    for (uint32_t i = 0; i < kCount; ++i) next[i] = lookup(cuts, index[i]);
  }
  if constexpr (kBits != 2) {
    for (uint32_t i = 0; i < kCount; ++i) {
      index[i] = or_where(magnitude[i] > next[i], index[i], U(1u));
    }
  }
}

// The power of two that brings a block's largest magnitude near 1 is 2^-k. Both are normal numbers.
GRADFERRY_LANE int32_t block_exponent(uint32_t largest_bits) {
  const int32_t exponent = static_cast<int32_t>(largest_bits >> 23) - 127;
  return exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
}
GRADFERRY_LANE float power_of_two(int32_t exponent) {
  return from_bits(static_cast<uint32_t>(exponent + 127) << 23);
}

// The scale of a block that was multiplied by 2^-k, as fp32 bits of a bf16 number: the quotient
// rounded to bf16, times 2^k, divided by the 128 that transforming twice multiplies by. 0 below the
// smallest normal number.
inline constexpr uint32_t kExponentBias = 256;  // of `biased_exponent`, k + 256
template <typename F>
GRADFERRY_LANE BitsOf<F> block_scale(F projection, F power, BitsOf<F> biased_exponent) {
  using U = BitsOf<F>;
  const U rounded = float_to_bf16(projection / power) << 16;
  const U exponent = (rounded >> 23) + biased_exponent;
  const U scale = rounded + ((biased_exponent - U(kExponentBias + 7)) << 23);
  return select(exponent >= U(kExponentBias + 7 + 1), scale, U(0u));
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::rht
