#include "kernels/chunk_launch.h"
#include "kernels/common/tile_launch.h"
#include "kernels/topk/topk_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecFunctions topk_functions;
const CodecFunctions topk_functions = TileLauncher<topk::TileCodec>::functions();

extern const ChunkKernels topk_chunks;
const ChunkKernels topk_chunks = ChunkLauncher<WithExact<topk::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
