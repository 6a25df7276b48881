// What the library of the CUDA kernels consists of.
#include <cuda_runtime_api.h>

#include "gradferry/cuda_codecs.h"

namespace gradferry {

namespace cuda {
extern const ChunkKernels chunk_kernels;
extern const NodeKernels node_kernels;
extern const MessageKernels message_kernels;
}  // namespace cuda

namespace {

// The default stream refuses to be asked while another stream of the device is captured.
bool goes_into_graph(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error == cudaErrorStreamCaptureImplicit || status != cudaStreamCaptureStatusNone;
}

}  // namespace

const DeviceLibrary& cuda_library() {
  static const DeviceLibrary library{kDeviceLibraryVersion, cuda::chunk_kernels, cuda::node_kernels,
                                     cuda::message_kernels, &goes_into_graph};
  return library;
}

}  // namespace gradferry
