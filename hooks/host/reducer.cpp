#include "gradferry/reducer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>

#include "background_thread.h"
#include "exchanger.h"
#include "host/start_reducer.h"
#include "host/tensor_memory.h"

namespace gradferry {
namespace {

// How long threads get, when the process ends, to close their connections.
constexpr std::chrono::milliseconds kAtExit{1000};

// The format of saved states.
constexpr int64_t kStateFormat = 1;

std::string in_quotes(const std::string& text) { return "'" + text + "'"; }

// Compares the layouts of two saved states.
void expect_same_layout(const std::string& saved, const std::string& here) {
  if (saved == here) return;
  std::istringstream saved_lines(saved), lines(here);
  std::string then, today;
  do {
    if (!std::getline(saved_lines, then)) then = "nothing";
    if (!std::getline(lines, today)) today = "nothing";
  } while (then == today && (saved_lines || lines));
  throw Error(ErrorKind::kState, "the state was saved with " + in_quotes(then) +
                                     ", and here it is " + in_quotes(today) +
                                     "; load what this rank saved, with the same world size, "
                                     "options and tensors");
}

void end_with_process() {
  BackgroundThread::stop_all(kAtExit);
  process_is_ending = true;
}

}  // namespace

class Reducer::Impl {
 public:
  Impl(const NamedTensors& tensors, const ReducerOptions& options,
       c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void all_reduce(const std::vector<at::Tensor>& gradients);
  void average_in_backward();
  void wait();
  ReducerStats stats() const;
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  class Hook;
  // Tensors that travel together, and what they are copied to.
  struct TensorBucket {
    std::vector<uint32_t> tensors;
    at::Tensor flat;
    std::vector<at::Tensor> views;
    FuturePtr future;      // of this step; null: not handed over yet
    size_t num_taken = 0;  // gradients of this step that were copied
  };
  struct BucketPlace {
    size_t bucket, index;
  };
  // The gradient that a backward pass gave a tensor, as it was when it was copied.
  struct Sent {
    at::Tensor gradient;
    int64_t version = 0;
    uint64_t sample = 0;
  };

  void make_buckets(double cap_mb);
  bool is_in_step() const;
  void expect_between_steps(const std::string& call) const;
  void check(size_t index, const at::Tensor& gradient);
  void check_memory(const std::vector<at::Tensor>& gradients);
  bool was_changed(size_t index) const;
  void take(size_t index, const at::Tensor& gradient);
  void hand_over(TensorBucket& bucket);
  void hand_over_full();
  void wait_for_buckets();
  void gradient_is_there(size_t index);
  [[noreturn]] void fail(const std::string& message);

  NamedTensors tensors_;
  const uint32_t rank_;
  std::vector<TensorBucket> buckets_;  // in the order of all ranks
  std::vector<BucketPlace> places_;    // by tensor
  std::vector<bool> taken_;            // by tensor: whether this step has copied its gradient
  std::vector<Sent> sent_;             // by tensor
  size_t num_handed_over_ = 0;         // buckets of this step
  bool in_backward_ = false;
  StartedReducer started_;
  std::shared_ptr<HostEngine>& engine_ = started_.engine;
};

// Autograd calls the hook of a tensor when its gradient of a pass is complete.
class Reducer::Impl::Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(Impl& reducer, size_t index) : reducer_(reducer), index_(index) {}
  void operator()(const torch::autograd::Variable& /*tensor*/) override {
    reducer_.gradient_is_there(index_);
  }

 private:
  Impl& reducer_;
  const size_t index_;
};

Reducer::Impl::Impl(const NamedTensors& tensors, const ReducerOptions& options,
                    c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size)
    : tensors_(tensors),
      rank_(rank),
      started_(start_reducer(tensors, options, std::move(store), rank, world_size,
                             [&] { make_buckets(options.bucket_cap_mb); })) {
  [[maybe_unused]] static const int registered = std::atexit(end_with_process);
}

// The last tensors first, of which a backward pass has the gradients first.
void Reducer::Impl::make_buckets(double cap_mb) {
  const double cap_bytes = cap_mb * (1 << 20);
  std::map<at::ScalarType, size_t> open;  // the bucket that is not full, by dtype
  places_.resize(tensors_.size());
  taken_.resize(tensors_.size());
  sent_.resize(tensors_.size());
  std::vector<uint64_t> num_bytes;  // by bucket
  for (size_t i = tensors_.size(); i-- > 0;) {
    const at::Tensor& tensor = tensors_[i].second;
    const auto found = open.find(tensor.scalar_type());
    size_t bucket = found == open.end() ? buckets_.size() : found->second;
    if (bucket < buckets_.size() &&
        static_cast<double>(num_bytes[bucket] + tensor.nbytes()) > cap_bytes) {
      bucket = buckets_.size();
    }
    if (bucket == buckets_.size()) {
      buckets_.emplace_back();
      num_bytes.push_back(0);
    }
    open[tensor.scalar_type()] = bucket;
    places_[i] = {bucket, buckets_[bucket].tensors.size()};
    buckets_[bucket].tensors.push_back(static_cast<uint32_t>(i));
    num_bytes[bucket] += tensor.nbytes();
  }
  const at::NoGradGuard no_grad;
  for (TensorBucket& bucket : buckets_) {
    int64_t size = 0;
    for (const uint32_t i : bucket.tensors) size += tensors_[i].second.numel();
    bucket.flat = at::empty({size}, at::dtype(tensors_[bucket.tensors[0]].second.scalar_type()));
    int64_t begin = 0;
    for (const uint32_t i : bucket.tensors) {
      const at::Tensor& tensor = tensors_[i].second;
      bucket.views.push_back(bucket.flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
      begin += tensor.numel();
    }
  }
}

Reducer::Impl::~Impl() {
  if (!in_backward_) return;
  for (const auto& [name, tensor] : tensors_) {
    torch::autograd::impl::set_post_acc_grad_hooks(tensor, nullptr);
  }
}

// --- a step ---

// Ends this Reducer on all ranks, which may be waiting for this one.
void Reducer::Impl::fail(const std::string& message) {
  const Error error(ErrorKind::kState, "rank " + std::to_string(rank_) + ": " + message);
  engine_->fail(error);
  engine_->expect_alive();  // throws it, with what to do
  throw error;
}

void Reducer::Impl::check(size_t index, const at::Tensor& gradient) {
  const std::string& name = tensors_[index].first;
  const at::Tensor& registered = buckets_[places_[index].bucket].views[places_[index].index];
  if (!gradient.defined()) {
    fail(in_quotes(name) + " is not a tensor; pass zeros for a parameter without a gradient");
  }
  if (gradient.layout() != at::kStrided || !gradient.is_cpu()) {
    fail(in_quotes(name) + " is not dense, or not on the CPU");
  }
  if (gradient.sizes() != registered.sizes() ||
      gradient.scalar_type() != registered.scalar_type()) {
    fail(in_quotes(name) + " is " + shape_and_dtype(gradient) + ", and " +
         shape_and_dtype(registered) + " was registered; make a new Reducer when tensors change");
  }
  if (gradient.is_inference()) {  // the average could not be written there
    fail(in_quotes(name) + " was made in inference mode; pass a clone()");
  }
}

// Looks at all gradients of a step before an average is written to one.
void Reducer::Impl::check_memory(const std::vector<at::Tensor>& gradients) {
  if (const auto problem = memory_shared(gradients, tensors_)) fail(*problem);
}

// Whether this step has copied gradients that wait() has not replaced by averages.
bool Reducer::Impl::is_in_step() const { return std::ranges::find(taken_, true) != taken_.end(); }

// How much of a step has been handed over depends on time.
void Reducer::Impl::expect_between_steps(const std::string& call) const {
  engine_->expect_alive();
  GRADFERRY_EXPECTS(!is_in_step(), kState,
                    call + " was called between backward() and wait(); call wait() first");
}

// Undefined: zeros.
void Reducer::Impl::take(size_t index, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  TensorBucket& bucket = buckets_[places_[index].bucket];
  const at::Tensor& view = bucket.views[places_[index].index];
  if (gradient.defined()) {
    view.copy_(gradient);
  } else {
    view.zero_();
  }
  ++bucket.num_taken;
  taken_[index] = true;
  hand_over_full();
}

void Reducer::Impl::hand_over(TensorBucket& bucket) {
  bucket.future = make_future(c10::TensorType::get(), bucket.flat);
  engine_->run(bucket.tensors, {}, bucket.flat, bucket.future, bucket.flat);
}

// In one order on all ranks, whichever is full first.
void Reducer::Impl::hand_over_full() {
  while (num_handed_over_ < buckets_.size()) {
    TensorBucket& next = buckets_[num_handed_over_];
    if (next.num_taken < next.tensors.size()) return;
    ++num_handed_over_;
    hand_over(next);
  }
}

void Reducer::Impl::wait_for_buckets() {
  std::vector<FuturePtr> futures;
  for (TensorBucket& bucket : buckets_) {
    futures.push_back(std::move(bucket.future));
    bucket.num_taken = 0;
  }
  num_handed_over_ = 0;
  taken_.assign(taken_.size(), false);
  sent_.assign(sent_.size(), {});
  PendingExchange(nullptr, {}, std::move(futures)).wait();
}

void Reducer::Impl::all_reduce(const std::vector<at::Tensor>& gradients) {
  engine_->expect_alive();
  if (is_in_step()) {
    fail("all_reduce() was called between a backward pass that averages and its wait()");
  }
  if (gradients.size() != tensors_.size()) {
    fail(std::to_string(gradients.size()) + " tensors were passed and " +
         std::to_string(tensors_.size()) + " registered; pass all of them, in that order");
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    check(i, gradients[i]);
    if (gradients[i].requires_grad()) {
      fail(in_quotes(tensors_[i].first) +
           " requires grad: a codec would round a parameter itself; pass its .grad()");
    }
  }
  check_memory(gradients);
  for (size_t i = gradients.size(); i-- > 0;) take(i, gradients[i]);
  wait_for_buckets();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i].copy_(buckets_[places_[i].bucket].views[places_[i].index]);
  }
}

void Reducer::Impl::average_in_backward() {
  engine_->expect_alive();
  if (in_backward_) return;
  for (const auto& [name, tensor] : tensors_) {
    GRADFERRY_EXPECTS(tensor.is_leaf() && tensor.requires_grad(), kConfig,
                      in_quotes(name) +
                          " is not a leaf that requires grad, so no backward pass gives it "
                          "a gradient; leave frozen parameters out, or use all_reduce()");
    GRADFERRY_EXPECTS(
        torch::autograd::impl::post_acc_grad_hooks(tensor) == nullptr, kConfig,
        in_quotes(name) +
            " already has a post-accumulate-grad hook, and torch allows only one; destroy the "
            "Reducer that averages it first");
  }
  in_backward_ = true;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(tensors_[i].second,
                                                   std::make_unique<Hook>(*this, i));
  }
}

void Reducer::Impl::gradient_is_there(size_t index) {
  engine_->expect_alive();
  const auto& [name, tensor] = tensors_[index];
  if (taken_[index]) {
    fail(in_quotes(name) +
         " got a second gradient before wait(): one backward pass is one step; for "
         "several use all_reduce()");
  }
  const at::Tensor& gradient = tensor.grad();
  check(index, gradient);
  sent_[index] = {gradient, static_cast<int64_t>(gradient._version()), sample_of(gradient)};
  take(index, gradient);
}

// Whether the gradient of a tensor is no longer what this step has copied. What is done to
// `.data()`, as clip_grad_norm_() does, leaves the version as it is, but not the sample.
bool Reducer::Impl::was_changed(size_t index) const {
  const Sent& sent = sent_[index];
  const at::Tensor& gradient = tensors_[index].second.grad();
  return !gradient.is_same(sent.gradient) ||
         static_cast<int64_t>(gradient._version()) != sent.version ||
         sample_of(gradient) != sent.sample;
}

void Reducer::Impl::wait() {
  engine_->expect_alive();
  if (!in_backward_) fail("wait() belongs to average_in_backward(), which was not called");
  if (!is_in_step()) {
    fail(
        "wait() without a backward pass since the last wait(), or the pass gave no tensor a "
        "gradient; call wait() once after each pass");
  }
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto& [name, tensor] = tensors_[i];
    gradients.push_back(tensor.grad());
    if (taken_[i] && was_changed(i)) {
      fail("the gradient of " + in_quotes(name) +
           " was changed or replaced after backward() had sent it; change the average instead, "
           "after wait()");
    }
    if (!taken_[i] && gradients[i].defined()) check(i, gradients[i]);
  }
  check_memory(gradients);
  for (size_t i = tensors_.size(); i-- > 0;) {
    if (!taken_[i]) take(i, gradients[i]);
  }
  wait_for_buckets();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& average = buckets_[places_[i].bucket].views[places_[i].index];
    at::Tensor& gradient = tensors_[i].second.mutable_grad();
    if (gradient.defined()) {
      gradient.copy_(average);
    } else {
      gradient = average.clone();
    }
  }
}

// --- between steps ---

ReducerStats Reducer::Impl::stats() const {
  const EngineStats stats = engine_->stats();
  return {.steps = stats.steps,
          .gradient_bytes = stats.gradient_bytes,
          .wire_bytes = stats.wire_bytes,
          .residual_bytes = stats.residual_bytes,
          .workspace_bytes = stats.workspace_bytes};
}

void Reducer::Impl::save(torch::serialize::OutputArchive& archive) const {
  expect_between_steps("save()");
  const EngineState state = engine_->state();
  archive.write("format", c10::IValue(kStateFormat));
  archive.write("layout", c10::IValue(started_.layout));
  archive.write("steps", c10::IValue(static_cast<int64_t>(state.steps)));
  archive.write("worker_residual", state.residuals.worker);
  archive.write("owner_residual", state.residuals.owner);
  archive.write("loss_scale", c10::IValue(double{state.residuals.loss_scale}));
}

void Reducer::Impl::load(torch::serialize::InputArchive& archive) {
  expect_between_steps("load()");
  c10::IValue format, layout, steps, loss_scale;
  GRADFERRY_EXPECTS(archive.try_read("format", format) && format.isInt(), kState,
                    "the archive does not hold the state of a Reducer");
  GRADFERRY_EXPECTS(format.toInt() == kStateFormat, kState,
                    "the state has format " + std::to_string(format.toInt()) +
                        ", and this gradferry reads format " + std::to_string(kStateFormat) +
                        "; load it with the version that saved it");
  EngineState state{};
  const bool is_complete = archive.try_read("layout", layout) && archive.try_read("steps", steps) &&
                           archive.try_read("loss_scale", loss_scale) &&
                           archive.try_read("worker_residual", state.residuals.worker) &&
                           archive.try_read("owner_residual", state.residuals.owner);
  const bool is_ours = is_complete && layout.isString() && steps.isInt() && loss_scale.isDouble();
  GRADFERRY_EXPECTS(is_ours, kState, "the archive does not hold the state of a Reducer");
  expect_same_layout(layout.toStringRef(), started_.layout);
  const auto is_sound = [](const at::Tensor& residual) {
    return residual.layout() == at::kStrided && at::isfinite(residual).all().item<bool>();
  };
  // Without a GradScaler residuals have no other units.
  const double units = loss_scale.toDouble();
  GRADFERRY_EXPECTS(
      steps.toInt() >= 0 && (units == 0 || units == 1) && is_sound(state.residuals.worker) &&
          is_sound(state.residuals.owner),
      kState,
      "the saved state is damaged: it holds numbers that no Reducer saves; load an older one");
  state.steps = static_cast<uint64_t>(steps.toInt());
  state.residuals.loss_scale = static_cast<float>(units);
  engine_->load_state(state);
}

// --- the handle ---

Reducer::Reducer(const NamedTensors& tensors, const ReducerOptions& options,
                 c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size)
    : impl_(std::make_unique<Impl>(tensors, options, std::move(store), rank, world_size)) {}
Reducer::~Reducer() = default;
Reducer::Reducer(Reducer&&) noexcept = default;
Reducer& Reducer::operator=(Reducer&&) noexcept = default;

Reducer::Impl& Reducer::impl() const {
  GRADFERRY_EXPECTS(impl_ != nullptr, kState,
                    "this Reducer was moved from; call the one that it was moved to");
  return *impl_;
}

void Reducer::all_reduce(const std::vector<at::Tensor>& tensors) { impl().all_reduce(tensors); }
void Reducer::average_in_backward() { impl().average_in_backward(); }
void Reducer::wait() { impl().wait(); }
ReducerStats Reducer::stats() const { return impl().stats(); }
void Reducer::save(torch::serialize::OutputArchive& archive) const { impl().save(archive); }
void Reducer::load(torch::serialize::InputArchive& archive) { impl().load(archive); }

}  // namespace gradferry
