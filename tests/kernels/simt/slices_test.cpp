// A tile's elements on their way between memory and lanes, wherever the array begins.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/common/slice.h"

namespace gradferry::emulated {
namespace {

template <ScalarType dtype>
__global__ void copy_tile(const std::byte* in, uint32_t num_elements, std::byte* out) {
  const Slice slice(num_elements);
  float x[kLaneElements];
  load_slice<dtype>(slice, in, x);
  store_slice<dtype>(slice, out, x);
}

// Arrays of their own, so that what is read or written beyond them is found by AddressSanitizer;
// what is written beyond the output's elements, without it too.
template <ScalarType dtype>
void expect_copies() {
  constexpr uint32_t kItem = item_bytes(dtype), kMargin = 16;
  for (const uint32_t num_elements : {4096u, 4095u, 3072u, 1025u, 1024u, 1u}) {
    const uint32_t num_bytes = num_elements * kItem;
    for (uint32_t in_off = 0; in_off < kQuad; ++in_off) {
      for (uint32_t out_off = 0; out_off < kQuad; ++out_off) {
        std::vector<std::byte> in(in_off * kItem + num_bytes);
        std::vector<std::byte> out(kMargin + out_off * kItem + num_bytes + kMargin,
                                   std::byte{0x55});
        for (uint32_t i = 0; i < num_elements; ++i) {  // small numbers, each unlike its neighbours
          const uint32_t item = narrow<dtype>(static_cast<float>(i % 1021));
          std::memcpy(in.data() + (in_off + i) * kItem, &item, kItem);
        }
        std::byte* copy = out.data() + kMargin + out_off * kItem;
        launch<copy_tile<dtype>>(1, kTileThreads, nullptr,
                                 static_cast<const std::byte*>(in.data()) + in_off * kItem,
                                 num_elements, copy);
        ASSERT_EQ(std::memcmp(copy, in.data() + in_off * kItem, num_bytes), 0)
            << num_elements << " elements, " << in_off << " to " << out_off << " off";
        for (const std::byte* p = out.data(); p < out.data() + out.size(); ++p) {
          const bool is_copy = p >= copy && p < copy + num_bytes;
          ASSERT_TRUE(is_copy || *p == std::byte{0x55});
        }
      }
    }
  }
}

TEST(Slices, MoveAtEveryAlignmentAndStayInsideEveryBuffer) {
  expect_copies<ScalarType::kFloat32>();
  expect_copies<ScalarType::kBFloat16>();
  expect_copies<ScalarType::kFloat16>();
}

}  // namespace
}  // namespace gradferry::emulated
