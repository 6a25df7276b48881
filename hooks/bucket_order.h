// The element order of a parameter's gradient in a DDP bucket: the memory order of the parameter if
// that is dense and non-overlapping, else row-major.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gradferry {

// Strides, in elements, that the gradient would have in a bucket made now. Dimensions of size 1
// have stride 1, so that equal orders have equal strides.
std::vector<int64_t> bucket_strides(const at::Tensor& parameter);

}  // namespace gradferry
