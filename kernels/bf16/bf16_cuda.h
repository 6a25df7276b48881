// The bf16 codec on CUDA.
#pragma once

#include "kernels/cuda/cast_kernels.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::bf16 {

using TileCodec = CastCodec<CodecRow::bf16, false>;

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE::bf16
