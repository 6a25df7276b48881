#include "kernels/chunk_launch.h"
#include "kernels/common/tile_launch.h"
#include "kernels/q4/q4_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecFunctions q4_functions;
const CodecFunctions q4_functions = TileLauncher<q4::TileCodec>::functions();

extern const ChunkKernels q4_chunks;
const ChunkKernels q4_chunks = ChunkLauncher<WithExact<q4::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
