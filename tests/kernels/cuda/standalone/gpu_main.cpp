// The tests of kernels in tests/kernels/simt on a GPU.
#include <cuda_runtime.h>

#include "gtest/gtest.h"

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;  // as CTest is told
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess) {
    std::printf("skipped: no GPU to run on (%s)\n", cudaGetErrorString(error));
    return kSkipped;
  }
  cudaDeviceProp properties{};
  (void)cudaGetDeviceProperties(&properties, 0);
  std::printf("on %s\n", properties.name);
  return testing::run_all(argc > 1 ? argv[1] : "");
}
