#include "reducer_view.h"

#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <unordered_map>

#include "bucket_order.h"

namespace gradferry {
namespace {

// Never instantiated: deriving from Reducer gives access to its protected members.
class OpenReducer : public c10d::Reducer {
 public:
  static const auto& parameters(const c10d::Reducer& reducer) {
    return reducer.*(&OpenReducer::params_);
  }
  static const auto& used(const c10d::Reducer& reducer) {
    return reducer.*(&OpenReducer::local_used_map_);
  }
  static const auto& buckets(const c10d::Reducer& reducer) {
    return reducer.*(&OpenReducer::buckets_);
  }
};

}  // namespace

std::vector<at::Tensor> reducer_parameters(const c10d::Reducer& reducer) {
  return OpenReducer::parameters(reducer);
}

UsedMap used_since_last_sync(const c10d::Reducer& reducer,
                             const std::vector<at::Tensor>& parameters) {
  const auto& reduced = OpenReducer::parameters(reducer);
  const at::Tensor map = OpenReducer::used(reducer).contiguous();
  std::unordered_map<const c10::TensorImpl*, bool> by_parameter;
  for (size_t i = 0; i < reduced.size(); ++i) {
    by_parameter[reduced[i].unsafeGetTensorImpl()] = map.const_data_ptr<int32_t>()[i] != 0;
  }
  UsedMap used;
  for (const at::Tensor& parameter : parameters) {
    used.push_back(by_parameter.at(parameter.unsafeGetTensorImpl()) ? 1 : 0);
  }
  return used;
}

namespace {

// The parameters for which differs(parameter, its view of a bucket).
template <typename Differs>
std::vector<at::Tensor> changed_since_buckets_were_made(const c10d::Reducer& reducer,
                                                        Differs differs) {
  std::vector<at::Tensor> changed;
  for (const auto& bucket : OpenReducer::buckets(reducer)) {
    // Sparse buckets have no views, nor have buckets without memory yet.
    for (size_t i = 0; i < bucket.bucket_views_in.size(); ++i) {
      const at::Tensor& parameter = bucket.variables[i];
      if (differs(parameter, bucket.bucket_views_in[i])) changed.push_back(parameter);
    }
  }
  return changed;
}

}  // namespace

std::vector<at::Tensor> reordered_since_buckets_were_made(const c10d::Reducer& reducer) {
  return changed_since_buckets_were_made(reducer, [](const auto& parameter, const auto& view) {
    return bucket_strides(view) != bucket_strides(parameter);
  });
}

std::vector<at::Tensor> moved_since_buckets_were_made(const c10d::Reducer& reducer) {
  return changed_since_buckets_were_made(reducer, [](const auto& parameter, const auto& view) {
    return view.device() != parameter.device();
  });
}

}  // namespace gradferry
