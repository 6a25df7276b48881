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

// The processor's conversion of a pair, against that of the kernels' rare paths: the same for every
// number, and for what is no number a NaN, whose bits nobody uses.
template <ScalarType dtype>
void expect_pairs() {
  for (uint32_t item = 0; item < 1u << 16; ++item) {
    const float x = widen<dtype>(item);
    float by_pair[2];
    widen_pair<dtype>(item | (item ^ 0x8000u) << 16, by_pair);
    ASSERT_EQ(bits(canonical(by_pair[0])), bits(canonical(x))) << std::hex << item;
    ASSERT_EQ(bits(canonical(by_pair[1])), bits(canonical(widen<dtype>(item ^ 0x8000u))));
    // The number itself, and those around it that decide how numbers between two are rounded.
    const float next = widen<dtype>(item + 1);
    const float halfway = 0.5f * x + 0.5f * next;  // exact: a place more than the format has
    for (const float y : {x, halfway, from_bits(bits(halfway) - 1), from_bits(bits(halfway) + 1)}) {
      if (!arrives_finite<dtype>(y)) continue;
      const uint32_t pair = narrow_pair<dtype>(y, -y);
      ASSERT_EQ(pair & 0xffffu, narrow<dtype>(y)) << std::hex << bits(y);
      ASSERT_EQ(pair >> 16, narrow<dtype>(-y)) << std::hex << bits(y);
    }
  }
}

TEST(Conversions, ByTheProcessorAreThoseOfTheFormat) {
  expect_pairs<ScalarType::kBFloat16>();
  expect_pairs<ScalarType::kFloat16>();
}

TEST(Conversions, OfAQuadMakeEveryNanTheCanonicalOne) {
  const float nan = from_bits(kNanBits), infinity = from_bits(kInfinityBits);
  const float x[kQuad] = {1.0f, nan, -infinity, 65520.0f};
  const Quad<ScalarType::kFloat16> halves = narrow_quad<ScalarType::kFloat16>(x, false);
  EXPECT_EQ(halves.word[0], 0x7e003c00u);
  EXPECT_EQ(halves.word[1], 0x7c00fc00u);
  const Quad<ScalarType::kBFloat16> wide = narrow_quad<ScalarType::kBFloat16>(x, false);
  EXPECT_EQ(wide.word[0], 0x7fc03f80u);
  EXPECT_EQ(wide.word[1], 0x4780ff80u);
}

TEST(Conversions, ArriveFiniteBelowALimit) {
  expect_limit<ScalarType::kFloat32>();
  expect_limit<ScalarType::kBFloat16>();
  expect_limit<ScalarType::kFloat16>();
}

}  // namespace
}  // namespace gradferry::emulated
