#include "bucket_engine.h"

#include <ATen/Functions.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <utility>

#include "engine_errors.h"
#include "protocol/workspace.h"
#include "residuals.h"
#include "scalar_type.h"

namespace gradferry {

FuturePtr make_future(c10::TypePtr type, const at::Tensor& tensor) {
  std::vector<c10::Device> devices;
  if (!tensor.is_cpu()) devices.push_back(tensor.device());
  return c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
}

namespace {

std::string name_of(Collective collective) {
  switch (collective) {
    case Collective::kReduceScatter: return "a reduce-scatter";
    case Collective::kAllGather: return "an all-gather";
    default: return "an all-reduce";
  }
}

void expect_possible(const ParameterSpec& parameter, Collective collective) {
  const auto expect_not = [&](bool wrong, const std::string& what) {
    GRADFERRY_EXPECTS(!wrong, kConfig, "parameter '" + parameter.name + "' has " + what);
  };
  const bool averages_all = collective == Collective::kAllReduce;
  const std::string name = name_of(collective);
  expect_not(averages_all && parameter.owner,
             "an owner, which only a reduce-scatter or an all-gather gives it");
  expect_not(!averages_all && !parameter.owner, "no owner, which " + name + " needs");
  expect_not(!averages_all && parameter.owner_residual,
             "an owner residual, but " + name +
                 " does not encode means; use error_feedback='worker' or 'none'");
  expect_not(!scatters(collective) && parameter.worker_residual,
             "a worker residual, but " + name + " keeps none; use error_feedback='none'");
}

// Returns the options if the collective can do what they ask for. In a reduce-scatter only its
// owner sees a mean, so nothing that another rank does can depend on it. In an all-gather nothing
// is averaged, and what a rank receives is a function of the parameters alone.
EngineOptions possible(EngineOptions options) {
  for (const ParameterSpec& parameter : options.parameters) {
    expect_possible(parameter, options.collective);
  }
  if (options.world_size == 1) {
    for (ParameterSpec& parameter : options.parameters) place_alone(parameter);
  }
  GRADFERRY_EXPECTS(!options.keep_gathered || !scatters(options.collective), kConfig,
                    "keep_gathered is for an all-gather, not for " + name_of(options.collective));
  if (options.collective == Collective::kAllReduce) return options;
  const auto expect_no = [&](bool asked_for, const std::string& what) {
    GRADFERRY_EXPECTS(!asked_for, kConfig, name_of(options.collective) + " has no " + what);
  };
  expect_no(options.momentum != 0,
            "momentum mode, which needs means on every rank; leave out momentum=" +
                std::to_string(options.momentum));
  expect_no(options.find_unused_parameters,
            "find_unused_parameters; hand over zeros for parameters without a gradient");
  expect_no(!options.nodes.is_flat(), "sums within nodes of several ranks; use nodes='flat'");
  // Alone, a rank owns everything.
  if (options.world_size == 1) options.collective = Collective::kAllReduce;
  return options;
}

}  // namespace

BucketEngine::BucketEngine(EngineOptions options, ParameterHashes hashes, c10::Device device,
                           bool exchanges)
    : options_(possible(std::move(options))),
      device_(device),
      exchanges_(exchanges),
      layout_(options_.parameters, options_.rank, options_.nodes),
      hashes_(std::move(hashes)),
      process_id_(getpid()),
      steps_(layout_.parameters().size()) {}

// --- a bucket ---

void BucketEngine::run(const std::vector<uint32_t>& parameters, UsedMap used,
                       const at::Tensor& gradient, const FuturePtr& future, c10::IValue value) {
  if (begin_run()) {
    std::optional<Error> failure;
    try {
      exchange(accept(parameters, std::move(used), gradient, future, std::move(value)));
    } catch (...) {
      failure = describe_failure(std::current_exception(), options_.world_rank());
    }
    // The peers may lack messages of this rank, so the engine cannot continue.
    const bool is_first = failure && fail(*failure);
    const std::lock_guard lock(life_.mutex);
    life_.running = false;
    life_.changed.notify_all();
    if (!failure) return;
    if (is_first) raise(*life_.death);
  }
  // What a bucket before this one met is not thrown: DDP would be left in the middle of a pass, and
  // meet the next one with an internal error.
  future->setErrorIfNeeded(options_.exception_of(*life_.death));
}

// False when the engine has failed.
bool BucketEngine::begin_run() {
  if (getpid() != process_id_) raise(called_after_fork(process_id_));
  const std::lock_guard lock(life_.mutex);
  if (life_.death) return false;
  if (life_.stop) raise(called_at_exit());
  life_.running = true;
  return true;
}

BucketEngine::Bucket BucketEngine::accept(const std::vector<uint32_t>& parameters, UsedMap used,
                                          const at::Tensor& gradient, FuturePtr future,
                                          c10::IValue value) {
  const int64_t begin_ns = EventLog::now();
  bool begins_step = false, begins_momentum = false, begins_check = false;
  uint64_t step = 0;
  {
    const std::lock_guard lock(life_.mutex);
    begins_step = steps_.add(parameters);
    step = steps_.step();
    if (begins_step) {
      begins_momentum = turn_to_momentum(step);
      // One that was due in a step of which no bucket came here is made up for.
      const uint64_t due = options_.checks_due(step);
      begins_check = std::exchange(checks_begun_, due) != due;
    }
  }
  const BucketPlan& plan = plan_for(parameters, step);
  check_gradient(plan, gradient);
  {
    const std::lock_guard lock(life_.mutex);
    life_.stats.gradient_bytes += gradient.nbytes();
  }
  return {.plan = &plan,
          .used = std::move(used),
          .gradient = gradient,
          .future = std::move(future),
          .value = std::move(value),
          .step = step,
          .begins_step = begins_step,
          .begins_momentum = begins_momentum,
          .begins_check = begins_check,
          .event = {.step = step,
                    .chunks = plan.chunks.size(),
                    .gradient_bytes = gradient.nbytes(),
                    .begin_ns = begin_ns}};
}

const BucketPlan& BucketEngine::plan_for(const std::vector<uint32_t>& parameters, uint64_t step) {
  const bool warmup = options_.in_warmup(step);
  auto& plans = plans_[warmup];
  const auto found = plans.find(parameters);
  if (found != plans.end()) return found->second;
  CodecChoice codecs = warmup ? CodecChoice::kWarmup : CodecChoice::kOwn;
  if (!exchanges_) codecs = CodecChoice::kExact;
  const PlanOptions plan_options = options_.planning(codecs, options_.touches_residuals(step));
  const BucketPlan& plan =
      plans.emplace(parameters, make_plan(layout_, parameters, plan_options)).first->second;
  const std::lock_guard lock(life_.mutex);
  ++life_.stats.workspace_allocations;
  return plan;
}

void BucketEngine::check_gradient(const BucketPlan& plan, const at::Tensor& gradient) const {
  const bool in_place = device_.is_cpu() ? gradient.is_cpu() : gradient.device() == device_;
  const bool fits =
      in_place && gradient.is_contiguous() &&
      static_cast<uint64_t>(gradient.numel()) == plan.num_elements &&
      (plan.num_elements == 0 || to_scalar_type(gradient.scalar_type()) == plan.dtype);
  GRADFERRY_EXPECTS(fits, kState,
                    "a bucket holds " + std::to_string(gradient.numel()) + " elements of " +
                        c10::toString(gradient.scalar_type()) + " on " + gradient.device().str() +
                        ", which does not match the " + std::to_string(plan.num_elements) +
                        " elements of its parameters at attach; do not wrap the hook in a "
                        "compress wrapper, and do not change parameters after attach");
}

void BucketEngine::count_in(Bucket& bucket) {
  const std::lock_guard lock(life_.mutex);
  bucket.event.bucket = life_.stats.buckets;
  if (!bucket.plan->chunks.empty()) ++life_.stats.buckets;
  ++life_.stats.in_flight;
}

void BucketEngine::pass(const std::vector<uint32_t>& parameters) {
  const std::lock_guard lock(life_.mutex);
  steps_.pass(parameters);
}

void BucketEngine::end_step() {
  const std::lock_guard lock(life_.mutex);
  steps_.end();
}

// --- errors and the end ---

void BucketEngine::raise(const Error& error) const {
  std::rethrow_exception(options_.exception_of(error));
}

bool BucketEngine::fail(const Error& error) {
  if (getpid() != process_id_) raise(called_after_fork(process_id_));  // its peers are the parent's
  bool is_first = false;
  {
    const std::lock_guard lock(life_.mutex);
    is_first = !life_.death;
    if (is_first) life_.death = finished(error, log_, options_);
    life_.changed.notify_all();
  }
  // A thread of the engine that sees the death would also report it, but may be waiting for others.
  options_.peers->tell(life_.death->what(), life_.death->kind());
  return is_first;
}

void BucketEngine::expect_alive() const {
  if (getpid() != process_id_) raise(called_after_fork(process_id_));
  const std::lock_guard lock(life_.mutex);
  if (life_.death) throw Error(*life_.death);
}

void BucketEngine::request_stop() {
  if (getpid() != process_id_) return;  // a forked child has none of the threads
  const std::lock_guard lock(life_.mutex);
  life_.stop = true;
  life_.changed.notify_all();
}

void BucketEngine::settle() {
  std::unique_lock lock(life_.mutex);
  life_.changed.wait(lock, [&] { return life_.stats.in_flight == 0 || life_.death; });
  if (life_.death) throw Error(*life_.death);
  lock.unlock();
  expect_no_fault();
}

bool BucketEngine::decode_kept(const std::vector<uint32_t>& parameters,
                               const at::Tensor& gradient) {
  expect_alive();
  try {
    const auto found = plans_[0].find(parameters);
    if (found == plans_[0].end()) return false;
    check_gradient(found->second, gradient);
    if (!decode_kept(found->second, gradient)) return false;
  } catch (...) {
    // The others have what they need, and go on to where this rank will not come.
    fail(describe_failure(std::current_exception(), options_.world_rank()));
    raise(*life_.death);
  }
  const std::lock_guard lock(life_.mutex);
  life_.stats.gradient_bytes += gradient.nbytes();
  return true;
}

// --- between steps ---

EngineStats BucketEngine::stats() const {
  const std::lock_guard lock(life_.mutex);
  EngineStats stats = life_.stats;
  stats.steps = steps_.finished_steps();
  stats.step_buckets = steps_.finished();
  stats.wire_bytes = sent_bytes();
  stats.local_bytes = local_bytes();
  stats.times = log_.totals();
  return stats;
}

uint64_t BucketEngine::current_step() const {
  const std::lock_guard lock(life_.mutex);
  return steps_.step();
}

// Throws unless the engine is between steps; `what` names the call. With life_.mutex held.
void BucketEngine::expect_between_steps(const char* what) const {
  if (life_.death) throw Error(*life_.death);
  const size_t seen = steps_.num_seen(), all = steps_.num_parameters();
  GRADFERRY_EXPECTS(
      life_.stats.in_flight == 0 && !life_.running && (seen == 0 || seen == all), kState,
      std::string("cannot ") + what + " in the middle of step " + std::to_string(steps_.step()) +
          ": " + std::to_string(seen) + " of " + std::to_string(all) +
          " gradients were handed over, " + std::to_string(life_.stats.in_flight) +
          " buckets are in flight; do it after backward() returned");
}

// Whether begin_momentum() is due, after so many steps. From then on it counts as done. With
// life_.mutex held.
bool BucketEngine::turn_to_momentum(uint64_t finished_steps) {
  if (!options_.turns_to_momentum() || finished_steps < options_.warmup_steps) return false;
  return !std::exchange(momentum_began_, true);
}

// Between steps, with life_.mutex held.
void BucketEngine::finish_warmup() {
  if (turn_to_momentum(steps_.finished_steps())) begin_momentum();
}

std::vector<float> BucketEngine::alphas() const {
  std::vector<float> alphas;
  for (const Parameter& parameter : layout_.parameters()) {
    const CodecChoice choice = exchanges_ ? CodecChoice::kOwn : CodecChoice::kExact;
    const ResolvedCodec& codec = layout_.codecs()[Layout::codec_index(parameter, choice)];
    alphas.push_back(options_.alpha(codec, options_.warmup_steps));
  }
  return alphas;
}

EngineState BucketEngine::state(const SavedResiduals& kept) {
  const std::lock_guard lock(life_.mutex);
  expect_between_steps("save the state");
  finish_warmup();
  return {steps_.finished_steps(), save_residuals(kept)};
}

void BucketEngine::load_state(const EngineState& state) {
  const std::lock_guard lock(life_.mutex);
  expect_between_steps("load a state");
  const at::Tensor &worker = state.residuals.worker, &owner = state.residuals.owner;
  expect_residuals_of(layout_, worker, owner);
  // Zeros, too: with memory -0 in a gradient becomes +0, and so it must be after a resume.
  if (worker.numel() != 0 || owner.numel() != 0) make_residuals();
  load_residuals(state.residuals);
  steps_.resume(state.steps);
  momentum_began_ = state.steps >= options_.warmup_steps;
  checks_begun_ = options_.checks_due(state.steps == 0 ? 0 : state.steps - 1);
}

void BucketEngine::add_to_worker_residual(uint32_t parameter, const at::Tensor& values,
                                          float factor) {
  const std::lock_guard lock(life_.mutex);
  expect_between_steps("change a residual");
  finish_warmup();
  const Parameter& target = parameter_to_change(layout_, parameter, values, device_);
  const ResidualRange range = layout_.worker_residual_range(target);
  if (range.begin == range.end) return;
  make_residuals();
  change_worker_residual(range.begin, leaders_part(layout_, target, values), factor);
}

void BucketEngine::scale_residuals(float factor) {
  const std::lock_guard lock(life_.mutex);
  expect_between_steps("scale residuals");
  finish_warmup();
  multiply_residuals(factor);
}

}  // namespace gradferry
