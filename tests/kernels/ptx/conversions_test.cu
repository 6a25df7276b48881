// What kernels find out about a number by the processor's conversions or without any, against the
// conversions of kernels/common/conversions.h.
#include <gtest/gtest.h>

#include "kernels/cuda/tile_kernels.h"
#include "tests/kernels/cuda/gpu_copy.h"

namespace gradferry::cuda {
namespace {

constexpr uint32_t kThreads = 128, kBlocks = 64;

GRADFERRY_DEVICE uint32_t first_thread() { return blockIdx.x * kThreads + threadIdx.x; }

// Rounding and finiteness are monotonic in the magnitude, so that the numbers around every power of
// two, around halves of a last place of both formats, and around the limit itself decide for all.
template <ScalarType dtype>
__global__ void count_wrong_limits(uint32_t* wrong) {
  constexpr uint32_t kLower[] = {0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0xffff};
  const auto check = [&](uint32_t pattern) {
    const float x = canonical(from_bits(pattern));
    if (arrives_finite<dtype>(x) != !is_not_finite(widen<dtype>(narrow<dtype>(x)))) {
      atomicAdd(wrong, 1);
    }
  };
  for (uint32_t i = first_thread(); i < 1u << 16; i += kBlocks * kThreads) {
    for (const uint32_t lower : kLower) check(i << 16 | lower);
    check(kLeastInfinite<dtype> - (1u << 15) + i);
    check(kSignBit | (kLeastInfinite<dtype> - (1u << 15) + i));
  }
}

// The same for every number, and for what is no number a NaN, whose bits nobody uses.
template <ScalarType dtype>
__global__ void count_wrong_pairs(uint32_t* wrong) {
  for (uint32_t item = first_thread(); item < 1u << 16; item += kBlocks * kThreads) {
    const float x = widen<dtype>(item);
    float pair[2];
    widen_pair<dtype>(item | (item ^ 0x8000u) << 16, pair);
    bool is_right = bits(canonical(pair[0])) == bits(canonical(x)) &&
                    bits(canonical(pair[1])) == bits(canonical(widen<dtype>(item ^ 0x8000u)));
    // The number itself, and those around it that decide how numbers between two are rounded.
    const float next = widen<dtype>(item + 1);
    const float halfway = 0.5f * x + 0.5f * next;  // exact: a place more than the format has
    for (const float y : {x, halfway, from_bits(bits(halfway) - 1), from_bits(bits(halfway) + 1)}) {
      if (!arrives_finite<dtype>(y)) continue;
      is_right &= narrow_pair<dtype>(y, -y) == (narrow<dtype>(y) | narrow<dtype>(-y) << 16);
    }
    if (!is_right) atomicAdd(wrong, 1);
  }
}

template <auto kKernel>
uint32_t count() {
  uint32_t wrong = 0;
  {
    const gradferry::testing::GpuCopy copy(&wrong, 1);
    launch<kKernel>(kBlocks, kThreads, nullptr, copy.get());
  }
  return wrong;
}

TEST(Conversions, ByTheProcessorAreThoseOfTheFormat) {
  EXPECT_EQ(count<count_wrong_pairs<ScalarType::kBFloat16>>(), 0u);
  EXPECT_EQ(count<count_wrong_pairs<ScalarType::kFloat16>>(), 0u);
}
TEST(Conversions, ArriveFiniteBelowALimit) {
  EXPECT_EQ(count<count_wrong_limits<ScalarType::kFloat32>>(), 0u);
  EXPECT_EQ(count<count_wrong_limits<ScalarType::kBFloat16>>(), 0u);
  EXPECT_EQ(count<count_wrong_limits<ScalarType::kFloat16>>(), 0u);
}

}  // namespace
}  // namespace gradferry::cuda
