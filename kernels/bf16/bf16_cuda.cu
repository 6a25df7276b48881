#include "kernels/bf16/bf16_cuda.h"
#include "kernels/cuda/chunk_launch.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecKernels bf16_chunks;
const CodecKernels bf16_chunks = ChunkLauncher<WithExact<bf16::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
