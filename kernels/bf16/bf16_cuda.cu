#include "kernels/bf16/bf16_cuda.h"
#include "kernels/chunk_launch.h"
#include "kernels/common/tile_launch.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecFunctions bf16_functions;
const CodecFunctions bf16_functions = TileLauncher<bf16::TileCodec>::functions();

extern const ChunkKernels bf16_chunks;
const ChunkKernels bf16_chunks = ChunkLauncher<WithExact<bf16::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
