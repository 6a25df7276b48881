#include "used_parameters.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "gradferry/error.h"

namespace gradferry {
namespace {

// Holds a strong reference to its parameter, like the graph node that owns this hook.
class MarkUsed final : public torch::autograd::FunctionPreHook {
 public:
  MarkUsed(std::shared_ptr<std::vector<std::atomic<bool>>> flags, size_t index,
           at::Tensor parameter)
      : flags_(std::move(flags)), index_(index), parameter_(std::move(parameter)) {}

  // Like DDP: used if .grad will be defined, by this gradient or an older one.
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (grads[0].defined() || parameter_.grad().defined()) {
      (*flags_)[index_].store(true, std::memory_order_relaxed);
    }
    return grads;
  }

 private:
  std::shared_ptr<std::vector<std::atomic<bool>>> flags_;
  size_t index_;
  at::Tensor parameter_;
};

}  // namespace

UsedParameters::UsedParameters(const std::vector<at::Tensor>& parameters, const UsedMap& used)
    : flags_(std::make_shared<Flags>(parameters.size())) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    (*flags_)[i].store(used[i] != 0, std::memory_order_relaxed);
    // DDP keeps the node, even of a parameter that is frozen now and may be unfrozen later.
    const auto node = torch::autograd::impl::try_get_grad_accumulator(parameters[i]);
    GRADFERRY_EXPECTS(node != nullptr, kState,
                      "DDP does not accumulate the gradient of parameter " + std::to_string(i) +
                          "; build a new DistributedDataParallel and attach again");
    node->add_pre_hook(std::make_unique<MarkUsed>(flags_, i, parameters[i]));
  }
}

UsedMap UsedParameters::take(const std::vector<uint32_t>& parameters) const {
  UsedMap used;
  used.reserve(parameters.size());
  for (const uint32_t index : parameters) {
    used.push_back((*flags_)[index].exchange(false, std::memory_order_relaxed) ? 1 : 0);
  }
  return used;
}

UnusedCopy::UnusedCopy(const Layout& layout, const std::vector<uint32_t>& parameters,
                       const UsedMap& used, const at::Tensor& gradient, const at::Tensor& worker,
                       const at::Tensor& owner) {
  uint64_t offset = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = layout.parameters()[parameters[i]];
    const uint64_t n = parameter.num_elements;
    const uint64_t begin = std::exchange(offset, offset + n);
    if (used[i] != 0 || n == 0) continue;
    keep(i, gradient, begin, n);
    const auto keep_residual = [&](const at::Tensor& residual, ResidualRange range) {
      if (!residual.defined() || range.begin == range.end) return;
      keep(i, residual, range.begin, range.end - range.begin);
    };
    keep_residual(worker, layout.worker_residual_range(parameter));
    keep_residual(owner, layout.owner_residual_range(parameter));
  }
}

void UnusedCopy::keep(size_t position, const at::Tensor& whole, uint64_t offset,
                      uint64_t num_elements) {
  const at::Tensor now =
      whole.narrow(0, static_cast<int64_t>(offset), static_cast<int64_t>(num_elements));
  parts_.push_back({position, now, now.clone()});
}

void UnusedCopy::put_back(const UsedMap& used) const {
  for (const CopiedPart& part : parts_) {
    if (used[part.position] == 0) part.now.copy_(part.before);
  }
}

}  // namespace gradferry
