// Codes of e2m1.h on CUDA, where a multiplication is cheaper than a table.
//
// 2^-127 times a doubled value (0, 1, 2, 3, 4, 6, 8 or 12) has its code in the lowest bits of the
// exponent and the highest bit of the fraction; 1 becomes subnormal, which is what makes it fit.
#pragma once

#include "kernels/common/e2m1.h"
#include "kernels/cuda/quads.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::e2m1 {

// The code of a number of nearest_doubled.
GRADFERRY_DEVICE uint32_t code_of_doubled(float doubled) {
  const uint32_t x = bits(doubled * 0x1p-127f);
  return (x >> 22 & 7) | x >> 28;
}

// The value of the low four bits of `code`: both products are exact.
GRADFERRY_DEVICE float value_of_code(uint32_t code, float half_scale) {
  const float x = from_bits((code & 7) << 22 | (code & 8) << 28);
  return x * 0x1p127f * half_scale;
}

// 2^-15 times the doubled values of the low four bits of each byte, exactly: as subnormal and small
// numbers of 16 bits, whose exponent and fraction begin with a code's bits.
GRADFERRY_DEVICE void half_values(uint32_t codes, float* x) {
  const uint32_t even = (codes << 9 & 0x0e000e00u) | (codes << 12 & 0x80008000u);
  const uint32_t odd = (codes << 1 & 0x0e000e00u) | (codes << 4 & 0x80008000u);
  float pairs[kQuad];
  widen_pair<ScalarType::kFloat16>(even, pairs);
  widen_pair<ScalarType::kFloat16>(odd, pairs + 2);
  x[0] = pairs[0], x[1] = pairs[2], x[2] = pairs[1], x[3] = pairs[3];
}

// What the scale bytes of a group with this exponent byte may be: 0, or kSmallestScaleCode .. most.
struct ScaleRange {
  uint32_t most;
  bool exponent_is_valid;
};
GRADFERRY_DEVICE ScaleRange scale_range(uint32_t exponent) {
  if (exponent == 0 || exponent == kNonFiniteExponent) return {0, true};
  const int32_t k = static_cast<int32_t>(exponent) - kExponentBias;
  return {k == kLargestExponent ? kCappedScaleCode : kLargestScaleCode,
          k >= kSmallestExponent && k <= kLargestExponent};
}
GRADFERRY_DEVICE bool is_valid_scale(uint32_t scale, const ScaleRange& range) {
  return range.exponent_is_valid &&
         (scale == 0 || (scale >= kSmallestScaleCode && scale <= range.most));
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::e2m1
