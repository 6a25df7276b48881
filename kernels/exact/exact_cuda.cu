#include "kernels/cuda/chunk_launch.h"
#include "kernels/exact/exact_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecKernels exact_chunks;
const CodecKernels exact_chunks = ChunkLauncher<WithExact<exact::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
