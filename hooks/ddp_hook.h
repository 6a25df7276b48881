// What DDP calls for every bucket: finds the bucket's parameters and hands it to the engine, or
// passes it through.
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
#include "step_counter.h"
#include "torch_compat.h"
#include "used_parameters.h"

namespace gradferry {

// A Future of `type` for what will be in `tensor`: where that is on a device with streams, whoever
// waits for the Future has its current stream wait.
FuturePtr make_future(c10::TypePtr type, const at::Tensor& tensor);

class BucketHook : public std::enable_shared_from_this<BucketHook> {
 public:
  // `parameters` in the order of the engine's layout; only their identity is kept. `group_name`:
  // DDP's process group, looked up on every call and never held. `engine` may be null: then every
  // bucket passes through.
  BucketHook(std::shared_ptr<BucketEngine> engine, const std::vector<at::Tensor>& parameters,
             std::string group_name, ExceptionFactory make_exception);

  // The engine changes only between steps, for codec="auto". Null: every bucket passes through.
  void use_engine(std::shared_ptr<BucketEngine> engine) { engine_ = std::move(engine); }

  // Has the engine know which parameters are used; `parameters` as for the constructor, `used` as
  // for UsedParameters.
  void watch_use(const std::vector<at::Tensor>& parameters, const UsedMap& used) {
    used_.emplace(parameters, used);
  }

  // At the first bucket of step `step`, or of a later one when that has begun, `callback` gets
  // this hook and the step's number, once, before anything becomes of the bucket: the same instant
  // on all ranks. It may change the engine, and call this again. Of one `purpose` there is one
  // callback, the last; those due at the same bucket come in the order of their purposes. Steps
  // count from 0; resume() changes the count.
  using StepCallback = std::function<void(const std::shared_ptr<BucketHook>&, uint64_t)>;
  void call_at(uint64_t step, StepCallback callback, const std::string& purpose);
  void resume(uint64_t step);
  // Steps that have begun and ended; only with call_at().
  uint64_t finished_steps() const { return steps_ ? steps_->finished_steps() : 0; }

  // Whether the bucket takes run(). Without an engine none does, and sparse ones never do: they
  // pass through the backend's own averaged all-reduce. To be asked once per bucket, as it comes.
  // Raises StateError for a sparse bucket where the engine needs every bucket.
  bool admit(const c10d::GradBucket& bucket);

  // Posted in bucket order; the backend's own future.
  FuturePtr pass_through(c10d::GradBucket& bucket) const;
  // Buckets that have taken the backend's all-reduce, through pass_through() or counted by
  // note_passed().
  uint64_t passed() const { return passed_.load(std::memory_order_relaxed); }
  void note_passed() const { passed_.fetch_add(1, std::memory_order_relaxed); }

  // Completes `future` with `value` when the averaged gradient lies in the bucket's buffer.
  // Raises ConfigError, StateError, or the engine's first error. Without the GIL.
  // StateError, too, for a parameter whose memory format has changed: residuals are in the old one.
  void run(const c10d::GradBucket& bucket, FuturePtr future, c10::IValue value) const;

  // Ends the engine, which tells the other ranks, and raises StateError: a bucket that never
  // reaches the engine would keep them waiting.
  [[noreturn]] void fail(const std::string& message) const;

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group() const;
  std::vector<uint32_t> indices_of(const c10d::GradBucket& bucket) const;
  void count(const c10d::GradBucket& bucket);
  void expect_same_order(const c10d::GradBucket& bucket,
                         const std::vector<uint32_t>& parameters) const;

  std::shared_ptr<BucketEngine> engine_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> index_;
  // Weak, and only so that no other tensor gets the address of one that is gone.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> identities_;
  std::vector<std::vector<int64_t>> strides_;  // in buckets, by parameter
  std::string group_name_;
  ExceptionFactory make_exception_;
  mutable std::atomic<uint64_t> passed_{0};
  std::optional<StepCounter> steps_;
  std::optional<UsedParameters> used_;
  struct Call {
    uint64_t step;
    StepCallback callback;
  };
  std::map<std::string, Call> calls_;  // by purpose
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
