// The exact codec on CUDA: the gradient's own numbers. fp64 is summed in fp64 and so has kernels of
// its own, exact_float64_tiles.h.
#pragma once

#include "kernels/cuda/cast_kernels.h"
#include "kernels/exact/exact_float64_tiles.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact {

using TileCodec = CastCodec<CodecRow::exact, true>;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::exact
