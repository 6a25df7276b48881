// What kernels find out about a number without converting it.
#include <gtest/gtest.h>

#include "kernels/common/tile_kernels.h"

namespace gradferry::emulated {
namespace {

// Rounding and finiteness are monotonic in the magnitude, so that the numbers around every power of
// two, around halves of a last place of both formats, and around the limit itself decide for all.
template <ScalarType dtype>
void expect_limit() {
  const auto check = [](uint32_t pattern) {
    const float x = canonical(from_bits(pattern));
    ASSERT_EQ(arrives_finite<dtype>(x), !is_not_finite(widen<dtype>(narrow<dtype>(x))))
        << std::hex << pattern;
  };
  for (uint32_t sign = 0; sign < 2; ++sign) {
    for (uint32_t upper = 0; upper < 1u << 15; ++upper) {
      for (const uint32_t lower : {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0xffffu}) {
        check(sign << 31 | upper << 16 | lower);
      }
    }
    for (uint32_t i = 0; i < 1u << 16; ++i) {
      check(sign << 31 | (kLeastInfinite<dtype> - (1u << 15) + i));
    }
  }
}

TEST(Conversions, ArriveFiniteBelowALimit) {
  expect_limit<ScalarType::kFloat32>();
  expect_limit<ScalarType::kBFloat16>();
  expect_limit<ScalarType::kFloat16>();
}

}  // namespace
}  // namespace gradferry::emulated
