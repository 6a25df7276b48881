#include "kernels/cuda/chunk_launch.h"
#include "kernels/topk/topk_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecKernels topk_chunks;
const CodecKernels topk_chunks = ChunkLauncher<WithExact<topk::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
