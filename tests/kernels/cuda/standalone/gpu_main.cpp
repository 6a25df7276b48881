// The tests of kernels on a GPU.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/kernels/cuda/kernels_under_test.h"

namespace gradferry::testing {
Effort effort() { return Effort::kAllTiles; }
bool offsets_are_far() { return false; }
}  // namespace gradferry::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  constexpr int kSkipped = 77;  // as CTest is told
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    std::printf("skipped: no GPU to run on (%s)\n", cudaGetErrorString(error));
    return kSkipped;
  }
  cudaDeviceProp properties{};
  (void)cudaGetDeviceProperties(&properties, 0);
  std::printf("on %s\n", properties.name);
  return RUN_ALL_TESTS();
}
