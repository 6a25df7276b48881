// The part of the CUDA runtime that kernels, as nvcc compiled them, and their tests call, on the
// machine: in place of libcudart. Kernels come from the PTX that nvcc puts into objects for a
// virtual architecture; a launch is over when it returns, with an error where the machine found a
// fault, whose text cudaGetErrorString() gives.
#include <cuda_runtime_api.h>
#include <fatbinary_section.h>

#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "tests/kernels/ptx/machine.h"

namespace {

std::unordered_map<const void*, std::string>& kernel_names() {
  static std::unordered_map<const void*, std::string> names;
  return names;
}

struct Shape {
  dim3 grid, block;
  size_t shared_bytes = 0;
  void* stream = nullptr;
};
thread_local Shape pushed;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_text = "no error";

cudaError_t fails(cudaError_t error, const std::string& text) {
  last_text = text;
  last_error = error;
  return error;
}

// Calls work(), and gives the fault that it finds as an error.
template <typename Work>
cudaError_t guarded(Work work) {
  try {
    work();
    return cudaSuccess;
  } catch (const ptx::Fault& fault) {
    return fails(cudaErrorLaunchFailure, fault.what());
  }
}

// What a fat binary begins with.
struct FatHeader {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t num_bytes;  // that follow
};

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): the names that nvcc calls
extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  const auto* data =
      reinterpret_cast<const char*>(static_cast<const __fatBinC_Wrapper_t*>(wrapper)->data);
  FatHeader header;
  std::memcpy(&header, data, sizeof(header));
  const std::string_view all(data, header.header_bytes + header.num_bytes);
  if (const size_t begin = all.find(".version "); begin != all.npos) {
    ptx::load_module(all.substr(begin, all.find('\0', begin) - begin));
  }
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** /*handle*/) {}
void __cudaUnregisterFatBinary(void** /*handle*/) {}
void __cudaRegisterVar(void** /*handle*/, char* /*host*/, char* /*address*/, const char* /*name*/,
                       int /*is_extern*/, size_t /*size*/, int /*is_constant*/, int /*is_global*/) {
}
void __cudaRegisterFunction(void** /*handle*/, const char* host, char* /*device*/, const char* name,
                            int /*thread_limit*/, uint3* /*thread*/, uint3* /*block*/,
                            dim3* /*block_shape*/, dim3* /*grid_shape*/, int* /*warp_size*/) {
  kernel_names()[host] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                               size_t shared_bytes, cudaStream_t /*stream*/) {
  const auto name = kernel_names().find(kernel);
  if (name == kernel_names().end()) {
    return fails(cudaErrorInvalidDeviceFunction, "the kernel was not registered");
  }
  if (grid.x == 0 || grid.y != 1 || grid.z != 1 || block.y != 1 || block.z != 1 ||
      shared_bytes != 0) {
    return fails(cudaErrorInvalidConfiguration,
                 name->second + " is launched in a shape that the machine does not know");
  }
  return guarded([&] { ptx::launch(name->second, grid.x, block.x, args); });
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  if (attribute != cudaDevAttrMultiProcessorCount) {
    return fails(cudaErrorInvalidValue, "an attribute that the machine does not have");
  }
  *value = static_cast<int>(ptx::options().multiprocessors);
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, const void* /*kernel*/,
                                                          int /*threads*/, size_t /*shared*/) {
  *num_blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : last_text.c_str();
}
cudaError_t cudaStreamIsCapturing(cudaStream_t /*stream*/, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t num_bytes) {
  *memory = ptx::allocate(num_bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  return guarded([&] {
    if (memory != nullptr) ptx::release(memory);
  });
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind /*kind*/) {
  return guarded([&] {
    ptx::note_copy(to, from, num_bytes);
    std::memcpy(to, from, num_bytes);
  });
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier)
