#include "ddp_hook.h"

#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/engine.h>

#include <new>
#include <utility>

#include "bucket_order.h"

namespace gradferry {

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

}  // namespace gradferry
