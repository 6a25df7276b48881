// The table of codecs on CUDA, in the library of the CUDA kernels.
#include <cuda_runtime_api.h>

#include <array>

#include "gradferry/cuda_codecs.h"
#include "kernels/codec_rows.h"

namespace gradferry {

namespace cuda {
#define GRADFERRY_DECLARE(codec) extern const CodecFunctions codec##_functions;
GRADFERRY_FOR_EACH_CODEC(GRADFERRY_DECLARE)
#undef GRADFERRY_DECLARE
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
#define GRADFERRY_ROW(codec) make_row(codec##_description, cuda::codec##_functions),
  static const auto table = std::to_array<Codec>({GRADFERRY_FOR_EACH_CODEC(GRADFERRY_ROW)});
#undef GRADFERRY_ROW
  static const DeviceLibrary library{kDeviceLibraryVersion, table,
                                     cuda::chunk_kernels,   cuda::node_kernels,
                                     cuda::message_kernels, &goes_into_graph};
  return library;
}

}  // namespace gradferry
