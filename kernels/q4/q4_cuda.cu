#include "kernels/cuda/chunk_launch.h"
#include "kernels/q4/q4_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecKernels q4_chunks;
const CodecKernels q4_chunks = ChunkLauncher<WithExact<q4::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
