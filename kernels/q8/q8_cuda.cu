#include "kernels/chunk_launch.h"
#include "kernels/common/tile_launch.h"
#include "kernels/q8/q8_cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

extern const CodecFunctions q8_functions;
const CodecFunctions q8_functions = TileLauncher<q8::TileCodec>::functions();

extern const ChunkKernels q8_chunks;
const ChunkKernels q8_chunks = ChunkLauncher<WithExact<q8::TileCodec>>::kernels();

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
