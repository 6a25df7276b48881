// The hook that DDP calls for every bucket. It finds the bucket's parameters and passes the bucket
// to the engine, or to the backend's own all-reduce ("passes through").
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "bucket_engine.h"
#include "torch_compat.h"

namespace c10d {
class Reducer;
}

namespace gradferry {

// Strides, in elements, that the gradient of `parameter` would have in a bucket of DDP made now: in
// the memory order of the parameter if that is dense and non-overlapping, else row-major.
// Dimensions of size 1 have stride 1, so that equal orders have equal strides.
std::vector<int64_t> bucket_strides(const at::Tensor& parameter);

// What DDP's Reducer knows, in protected members. Their names and types are the same in every
// supported version of torch; a change of their type is a compile error.

// The parameters that DDP reduces, fixed when it was built. Its public functions give only those of
// buckets that have memory.
std::vector<at::Tensor> reducer_parameters(const c10d::Reducer& reducer);

// For each of `parameters`, which must be the reducer's, whether it was used since the last synced
// pass, for example under no_sync().
UsedMap used_since_last_sync(const c10d::Reducer& reducer,
                             const std::vector<at::Tensor>& parameters);

// Parameters whose memory format has changed since the present buckets were made. DDP writes their
// gradients to a bucket in the old element order and reads them in the new one.
std::vector<at::Tensor> reordered_since_buckets_were_made(const c10d::Reducer& reducer);
// Parameters that have since moved to another device than their bucket's.
std::vector<at::Tensor> moved_since_buckets_were_made(const c10d::Reducer& reducer);

// Finds the parameters whose gradients were accumulated, as DDP itself does: by a hook on the
// accumulation, which runs before DDP calls the hook for the bucket. Passes under no_sync() count.
class UsedParameters {
 public:
  // Watches from now on, for as long as DDP keeps the nodes that accumulate gradients. `used`: for
  // each parameter, whether it was already used since the last synced pass.
  UsedParameters(const std::vector<at::Tensor>& parameters, const UsedMap& used);

  // Whether each parameter was used since the last call for it.
  UsedMap take(const std::vector<uint32_t>& parameters) const;

 private:
  using Flags = std::vector<std::atomic<bool>>;  // by parameter
  std::shared_ptr<Flags> flags_;
};

class BucketHook : public std::enable_shared_from_this<BucketHook> {
 public:
  // `parameters` in the order of the engine's layout; only their identity is kept. `group_name`:
  // DDP's process group, looked up on every call and never held. `engine` may be null: then every
  // bucket passes through.
  BucketHook(std::shared_ptr<BucketEngine> engine, const std::vector<at::Tensor>& parameters,
             std::string group_name, ExceptionFactory make_exception);

  // The engine changes only between steps, for codec="auto". Null: every bucket passes through.
  void use_engine(std::shared_ptr<BucketEngine> engine) { engine_ = std::move(engine); }

  // From now on tells the engine which parameters this rank used; `parameters` as for the
  // constructor, `used` as for UsedParameters.
  void watch_use(const std::vector<at::Tensor>& parameters, const UsedMap& used) {
    used_.emplace(parameters, used);
  }

  // From now on a step ends with its backward pass. Without this it ends when all parameters came,
  // or one came again: DDP with skip_all_reduce_unused_params leaves out the buckets that no rank
  // used.
  void end_steps_with_passes() { ends_with_passes_ = true; }

  // Calls `callback` once, with this hook and the number of the step, at the first bucket of step
  // `step`, or of the next step if `step` has begun. This is the same point on all ranks; nothing
  // has been done with the bucket yet. The callback may change the engine and use call_at() again.
  // A new callback replaces an older one with the same `purpose`; those due at the same bucket run
  // in the order of their purposes. Steps count from 0; resume() sets the count.
  using StepCallback = std::function<void(const std::shared_ptr<BucketHook>&, uint64_t)>;
  void call_at(uint64_t step, StepCallback callback, const std::string& purpose);
  void resume(uint64_t step) { steps_.resume(step); }
  // Synced backward passes that have begun, with an engine or without.
  uint64_t finished_steps() const { return steps_.finished_steps(); }

  // Whether the bucket must go to run(). Without an engine no bucket does, and sparse ones never
  // do: they take the backend's own averaged all-reduce. Call it exactly once per bucket, in order.
  // Throws StateError for a sparse bucket where the engine needs every bucket.
  bool admit(const c10d::GradBucket& bucket);

  // Posts the backend's all-reduce, in bucket order; returns the backend's own future.
  FuturePtr pass_through(c10d::GradBucket& bucket) const;
  // Buckets that have taken the backend's all-reduce, through pass_through() or counted by
  // note_passed().
  uint64_t passed() const { return passed_.load(std::memory_order_relaxed); }
  void note_passed() const { passed_.fetch_add(1, std::memory_order_relaxed); }

  // Completes `future` with `value` when the averaged gradient is in the bucket's buffer. Call it
  // without the GIL. Throws ConfigError, StateError, or the engine's first error. StateError also
  // means that a parameter changed its memory format: residuals are in the old one.
  void run(const c10d::GradBucket& bucket, const FuturePtr& future, c10::IValue value) const;

  // Ends the engine, which tells the other ranks, and raises StateError: a bucket that never
  // reaches the engine would keep them waiting.
  [[noreturn]] void fail(const std::string& message) const;
  // The same where std::bad_alloc came before the engine had the bucket.
  [[noreturn]] void fail_without_memory() const;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group() const;
  std::vector<uint32_t> indices_of(const c10d::GradBucket& bucket) const;
  void count(const c10d::GradBucket& bucket);
  void end_step_after_pass();
  void expect_same_order(const c10d::GradBucket& bucket,
                         const std::vector<uint32_t>& parameters) const;

  std::shared_ptr<BucketEngine> engine_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> index_;
  // Weak references: they only keep another tensor from getting the address of a freed one.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> identities_;
  std::vector<std::vector<int64_t>> strides_;  // in buckets, by parameter
  std::string group_name_;
  ExceptionFactory make_exception_;
  mutable std::atomic<uint64_t> passed_{0};
  StepCounter steps_;
  bool ends_with_passes_ = false;
  std::optional<UsedParameters> used_;
  struct DueCall {
    uint64_t step;
    StepCallback callback;
  };
  std::map<std::string, DueCall> calls_;  // by purpose
};

// The native hook: no Python and no GIL on its path.
class NativeHook final : public c10d::CommHookInterface {
 public:
  explicit NativeHook(std::shared_ptr<BucketHook> hook) : hook_(std::move(hook)) {}
  FuturePtr runHook(c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  std::shared_ptr<BucketHook> hook_;
};

}  // namespace gradferry
