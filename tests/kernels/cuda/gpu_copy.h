// Host memory that is on the GPU for the length of a call. Every range is an allocation of its own
// that ends where the range ends, so that compute-sanitizer finds what lies beyond it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace gradferry::testing {

inline void expect_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Copied back at the end of its life unless T is const. Null stays null.
template <typename T>
class GpuCopy {
 public:
  GpuCopy(T* host, size_t size) : host_(host), num_bytes_(size * sizeof(T)) {
    if (host == nullptr || num_bytes_ == 0) return;
    // As misaligned as the host's memory is.
    shift_ = reinterpret_cast<uintptr_t>(host) % kAlignment;
    expect_cuda(cudaMalloc(&memory_, shift_ + num_bytes_), "cudaMalloc");
    expect_cuda(cudaMemcpy(bytes(), host, num_bytes_, cudaMemcpyHostToDevice), "copy to the GPU");
  }
  ~GpuCopy() noexcept(false) {
    if (memory_ == nullptr) return;
    const cudaError_t error = copy_back();
    (void)cudaFree(memory_);
    expect_cuda(error, "copy from the GPU");
  }
  GpuCopy(const GpuCopy&) = delete;
  GpuCopy& operator=(const GpuCopy&) = delete;

  T* get() const { return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(bytes()); }

 private:
  static constexpr uintptr_t kAlignment = 16;

  std::byte* bytes() const { return static_cast<std::byte*>(memory_) + shift_; }
  cudaError_t copy_back() const {
    if constexpr (std::is_const_v<T>) {
      return cudaSuccess;
    } else {
      return cudaMemcpy(host_, bytes(), num_bytes_, cudaMemcpyDeviceToHost);
    }
  }

  T* host_;
  size_t num_bytes_;
  uintptr_t shift_ = 0;
  void* memory_ = nullptr;
};

}  // namespace gradferry::testing
