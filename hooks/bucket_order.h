// In which order DDP lays a parameter's gradient into a bucket: that of the parameter's memory
// where this is dense and does not overlap itself, else row-major.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gradferry {

// Strides, in elements, of the gradient in a bucket that DDP would make now. Where the size is 1
// the stride is 1, so that equal orders have equal strides.
std::vector<int64_t> bucket_strides(const at::Tensor& parameter);

}  // namespace gradferry
