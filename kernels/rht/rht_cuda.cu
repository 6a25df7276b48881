#include "kernels/cuda/chunk_launch.h"
#include "kernels/rht/rht_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecKernels rht_chunks;
const CodecKernels rht_chunks = ChunkLauncher<WithExact<rht::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
