#include "kernels/cuda/chunk_launch.h"
#include "kernels/q8/q8_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecKernels q8_chunks;
const CodecKernels q8_chunks = ChunkLauncher<WithExact<q8::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
