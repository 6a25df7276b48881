#include "kernels/cuda/chunk_launch.h"
#include "kernels/sign1/sign1_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecKernels sign1_chunks;
const CodecKernels sign1_chunks = ChunkLauncher<WithExact<sign1::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
