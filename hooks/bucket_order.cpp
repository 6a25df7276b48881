#include "bucket_order.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace gradferry {
namespace {

// Never made: it lends access to the buckets, which DDP shows to nobody but derived classes.
class OpenReducer : public c10d::Reducer {
 public:
  static auto buckets() { return &OpenReducer::buckets_; }
};

}  // namespace

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

std::vector<at::Tensor> reordered_since_buckets_were_made(const c10d::Reducer& reducer) {
  std::vector<at::Tensor> reordered;
  for (const auto& bucket : reducer.*OpenReducer::buckets()) {
    // Sparse buckets have no views, and neither have those that wait for their memory.
    for (size_t i = 0; i < bucket.bucket_views_in.size(); ++i) {
      const at::Tensor& parameter = bucket.variables[i];
      if (bucket_strides(bucket.bucket_views_in[i]) != bucket_strides(parameter)) {
        reordered.push_back(parameter);
      }
    }
  }
  return reordered;
}

}  // namespace gradferry
