#include "bucket_order.h"

namespace gradferry {

std::vector<int64_t> bucket_strides(const at::Tensor& parameter) {
  const auto sizes = parameter.sizes();
  std::vector<int64_t> strides = parameter.strides().vec();
  if (!parameter.is_non_overlapping_and_dense()) {
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      strides[i] = stride;
      stride *= sizes[i];
    }
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) strides[i] = 1;
  }
  return strides;
}

}  // namespace gradferry
