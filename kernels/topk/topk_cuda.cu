#include "kernels/cuda/chunk_launch.h"
#include "kernels/topk/topk_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const ChunkKernels topk_chunks;
const ChunkKernels topk_chunks = ChunkLauncher<WithExact<topk::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
