#include "ddp_hook.h"

#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <new>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>

namespace gradferry {

FuturePtr NativeHook::runHook(c10d::GradBucket& bucket) {
  try {
    if (!hook_->admit(bucket)) return hook_->pass_through(bucket);
    auto future = make_future(c10::TensorType::get(), bucket.getBuffer());
    hook_->run(bucket, future, bucket.getBuffer());
    return future;
  } catch (const std::bad_alloc&) {
    hook_->fail_without_memory();
  }
}

at::Tensor NativeHook::parseHookResult(const c10::IValue& result) {
  return c10d::detail::parseCppCommHookResult(result);
}

BucketHook::BucketHook(std::shared_ptr<BucketEngine> engine,
                       const std::vector<at::Tensor>& parameters, std::string group_name,
                       ExceptionFactory make_exception)
    : engine_(std::move(engine)),
      group_name_(std::move(group_name)),
      make_exception_(make_exception),
      steps_(parameters.size()) {
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    index_.emplace(parameters[i].unsafeGetTensorImpl(), i);
    identities_.emplace_back(parameters[i].getIntrusivePtr());
    strides_.push_back(bucket_strides(parameters[i]));
  }
}

void BucketHook::fail(const std::string& message) const {
  const Error error(ErrorKind::kState, message);
  if (engine_) engine_->fail(error);
  std::rethrow_exception(make_exception_(error));
}

void BucketHook::fail_without_memory() const {
  fail("out of memory while handing over a bucket; use a smaller batch or model");
}

c10::intrusive_ptr<c10d::ProcessGroup> BucketHook::group() const {
  try {
    return c10d::resolve_process_group(group_name_);
  } catch (const std::exception&) {
    fail("the process group '" + group_name_ +
         "' of this DistributedDataParallel was destroyed; build a new one and attach again");
  }
}

void BucketHook::call_at(uint64_t step, StepCallback callback, const std::string& purpose) {
  calls_[purpose] = {step, std::move(callback)};
}

void BucketHook::count(const c10d::GradBucket& bucket) {
  const bool begins = steps_.add(indices_of(bucket));
  if (ends_with_passes_) end_step_after_pass();
  if (!begins) return;
  std::vector<StepCallback> due;  // collected first: callbacks may use call_at()
  for (auto call = calls_.begin(); call != calls_.end();) {
    if (call->second.step <= steps_.step()) {
      due.push_back(std::move(call->second.callback));
      call = calls_.erase(call);
    } else {
      ++call;
    }
  }
  for (const StepCallback& callback : due) callback(shared_from_this(), steps_.step());
}

// autograd runs its callbacks at the end of a pass that succeeded. A pass may have others within,
// of reentrant checkpoints, and a callback belongs to the innermost: so every bucket brings one,
// and those within a node of another pass do nothing. One that was abandoned leaves the step open:
// its residuals belong to no state.
void BucketHook::end_step_after_pass() {
  if (torch::autograd::get_current_graph_task_id() < 0) return;  // of a rank that waits in join()
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    const auto hook = weak.lock();
    if (!hook || torch::autograd::get_current_node()) return;
    hook->steps_.end();
    if (hook->engine_) hook->engine_->end_step();
  });
}

bool BucketHook::admit(const c10d::GradBucket& bucket) {
  count(bucket);
  if (engine_ != nullptr && !bucket.getBuffer().is_sparse()) return true;
  if (used_) (void)used_->take(indices_of(bucket));  // resets the flags, as run() would
  if (engine_ == nullptr) return false;
  if (engine_->needs_every_bucket()) {
    fail(
        "a sparse gradient came, which momentum= cannot handle; build the embedding with "
        "sparse=False, or attach without momentum");
  }
  engine_->pass(indices_of(bucket));
  return false;
}

FuturePtr BucketHook::pass_through(c10d::GradBucket& bucket) const {
  const auto process_group = group();
  note_passed();
  std::vector<at::Tensor> tensors = {bucket.getBufferRef()};
  tensors[0].div_(process_group->getSize());
  return process_group->allreduce(tensors)->getFuture();
}

std::vector<uint32_t> BucketHook::indices_of(const c10d::GradBucket& bucket) const {
  std::vector<uint32_t> parameters;
  for (const at::Tensor& parameter : bucket.getParameters()) {
    const auto found = index_.find(parameter.unsafeGetTensorImpl());
    if (found == index_.end()) {
      fail(
          "this hook is bound to another DistributedDataParallel: a bucket holds a parameter that "
          "the one it was attached to does not reduce; each needs a HookState of its own");
    }
    parameters.push_back(found->second);
  }
  return parameters;
}

void BucketHook::expect_same_order(const c10d::GradBucket& bucket,
                                   const std::vector<uint32_t>& parameters) const {
  const std::vector<at::Tensor> tensors = bucket.getParameters();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (bucket_strides(tensors[i]) != strides_[parameters[i]]) {
      fail("the memory format of parameter '" + engine_->layout().parameters()[parameters[i]].name +
           "' has changed since attach, and DDP now mixes up its gradient; change memory formats "
           "before you build a new DistributedDataParallel and attach");
    }
  }
}

void BucketHook::run(const c10d::GradBucket& bucket, const FuturePtr& future,
                     c10::IValue value) const {
  try {
    (void)group();  // throws if the group was destroyed
    const std::vector<uint32_t> parameters = indices_of(bucket);
    expect_same_order(bucket, parameters);
    at::Tensor gradient = bucket.getBuffer().detach();
    if (gradient.is_complex()) gradient = at::view_as_real(gradient);
    // DDP frees it too early when a backward pass is abandoned, or when DDP is built anew.
    engine_->expect_early_end(gradient);
    UsedMap used = used_ ? used_->take(parameters) : UsedMap();
    engine_->run(parameters, std::move(used), gradient.view({-1}), future, std::move(value));
  } catch (const std::bad_alloc&) {
    fail_without_memory();
  }
}

// --- what DDP knows ---

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

}  // namespace gradferry
