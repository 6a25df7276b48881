#include "device_engine.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>

#include "device_bytes.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

constexpr uint32_t kLeastChunkBytes = kTileElements * sizeof(double);

c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

}  // namespace

DeviceEngine::DeviceEngine(EngineOptions options, c10::Device device, ParameterHashes hashes,
                           std::unique_ptr<DeviceTransport> transport)
    : options_(std::move(options)),
      device_(device),
      layout_(options_.parameters, options_.rank, options_.world_size, Device::kCuda),
      hashes_(std::move(hashes)),
      process_id_(getpid()),
      encode_stream_(new_stream(device)),
      finish_stream_(new_stream(device)),
      transport_(std::move(transport)),
      commit_done_(device.type()),
      steps_(layout_.parameters().size()),
      optimizer_steps_(options_.loss_scale) {
  GRADFERRY_EXPECTS(options_.chunk_bytes >= kLeastChunkBytes, kConfig,
                    "chunk_bytes is " + std::to_string(options_.chunk_bytes) +
                        "; it must be at least " + std::to_string(kLeastChunkBytes));
}

std::shared_ptr<DeviceEngine> DeviceEngine::start(EngineOptions options, c10::Device device,
                                                  ParameterHashes hashes,
                                                  std::unique_ptr<DeviceTransport> transport) {
  GRADFERRY_EXPECTS(device.has_index(), kConfig, "the device has no index");
  std::shared_ptr<DeviceEngine> engine(
      new DeviceEngine(std::move(options), device, std::move(hashes), std::move(transport)));
  if (!engine->transport_ && engine->options_.momentum == 0) return engine;
  engine->allocate();
  engine->load_kernels();
  if (!engine->transport_ || !engine->transport_->waits()) return engine;
  engine->worker_ = Worker::start("gf-staged");
  // The handle's last copy stops the thread; its last act holds the engine until then.
  return {engine.get(), [engine](DeviceEngine*) {
            if (getpid() != engine->process_id_) return;  // a forked child has no such thread
            engine->worker_->stop([engine] {
              const std::lock_guard lock(engine->mutex_);
              engine->transport_->close(engine->death_.has_value());
            });
          }};
}

void DeviceEngine::raise(const Error& error) const {
  std::rethrow_exception(options_.make_exception(error));
}

void DeviceEngine::run(const std::vector<uint32_t>& parameters, UsedMap /*used*/,
                       const at::Tensor& gradient, FuturePtr future, c10::IValue value) {
  begin_run();
  std::exception_ptr failure;
  try {
    submit(make_job(parameters, gradient, std::move(future), std::move(value)));
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) {
    fail(failure, {});
    const std::lock_guard lock(mutex_);
    raise(*death_);
  }
}

void DeviceEngine::begin_run() {
  if (getpid() != process_id_) raise(called_after_fork(process_id_));
  const std::lock_guard lock(mutex_);
  if (death_) raise(*death_);
}

void DeviceEngine::fail(const std::exception_ptr& failure, const FuturePtr& future) {
  const Error error = describe_failure(failure, options_.rank);
  options_.peers->tell(error.what());
  const std::lock_guard lock(mutex_);
  if (!death_) death_ = finished(error, log_, options_.rank);
  if (future) future->setErrorIfNeeded(options_.make_exception(*death_));
}

DeviceEngine::BucketJob DeviceEngine::make_job(const std::vector<uint32_t>& parameters,
                                               const at::Tensor& gradient, FuturePtr future,
                                               c10::IValue value) {
  bool begins_step = false, begins_optimizer_step = false;
  uint64_t step = 0, number = 0;
  {
    const std::lock_guard lock(mutex_);
    begins_step = steps_.add(parameters);
    if (begins_step && options_.exact_skip) {
      begins_optimizer_step = optimizer_steps_.begin_pass(hashes_);
    }
    step = steps_.step();
    number = stats_.buckets;
  }
  const DevicePlan& plan = plan_for(parameters, options_.in_warmup(step));
  check_gradient(plan.plan(), gradient);
  c10::Event ready = take_event();
  ready.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  BucketEvent event{.step = step,
                    .bucket = number,
                    .chunks = plan.chunks().size(),
                    .gradient_bytes = gradient.nbytes(),
                    .begin_ns = EventLog::now()};
  return {&plan, gradient, std::move(future), std::move(value),      std::move(ready),
          step,  number,   begins_step,       begins_optimizer_step, event,
          {}};
}

void DeviceEngine::submit(BucketJob job) {
  if (!transport_) return finish_alone(job);
  {
    const std::lock_guard lock(mutex_);
    if (!job.plan->chunks().empty()) ++stats_.buckets;
    stats_.gradient_bytes += job.gradient.nbytes();
    ++stats_.in_flight;
  }
  if (!worker_) return exchange(job);
  auto shared = std::make_shared<BucketJob>(std::move(job));
  const bool added = worker_->add([this, shared] {
    try {
      {
        const std::lock_guard lock(mutex_);
        if (death_) throw Error(*death_);
      }
      const ProfilerContext::Guard profiled(shared->profiler);
      exchange(*shared);
    } catch (...) {
      fail(std::current_exception(), shared->future);
    }
  });
  GRADFERRY_EXPECTS(added, kState, "gradferry was shut down; it cannot compress at exit");
}

// Nothing travels: gradients stay as they are, but for the momentum.
void DeviceEngine::finish_alone(BucketJob& job) {
  const bool momentum = options_.has_momentum(job.step);
  if (momentum) add_momentum_alone(job);
  give_back(std::move(job.ready));
  const c10::OptionalStreamGuard guard(momentum ? std::optional(encode_stream_) : std::nullopt);
  GRADFERRY_EXPECTS(!options_.raise_nonfinite || at::isfinite(job.gradient).all().item<bool>(),
                    kState,
                    "a gradient is not finite at step " + std::to_string(job.step) +
                        "; lower the learning rate or the loss scale");
  job.future->markCompleted(std::move(job.value));
}

void DeviceEngine::check_gradient(const BucketPlan& plan, const at::Tensor& gradient) const {
  const bool fits =
      gradient.device() == device_ && gradient.is_contiguous() &&
      static_cast<uint64_t>(gradient.numel()) == plan.num_elements &&
      (plan.num_elements == 0 || to_scalar_type(gradient.scalar_type()) == plan.dtype);
  GRADFERRY_EXPECTS(fits, kState,
                    "a bucket holds " + std::to_string(gradient.numel()) + " elements of " +
                        c10::toString(gradient.scalar_type()) + " on " + gradient.device().str() +
                        ", other than its " + std::to_string(plan.num_elements) +
                        " elements had at attach; do not wrap the hook in a compress wrapper, and "
                        "do not change parameters after attach");
}

const DevicePlan& DeviceEngine::plan_for(const std::vector<uint32_t>& parameters, bool warmup) {
  auto& plans = plans_[warmup];
  const auto found = plans.find(parameters);
  if (found != plans.end()) return found->second;
  std::vector<std::byte*> received;
  for (const DeviceSlot& slot : slots_) {
    if (transport_) received.push_back(bytes(slot.scatter_receive));
  }
  // Read by E, and by F only behind E.
  const c10::StreamGuard guard(encode_stream_);
  const PlanOptions plan_options{options_.rank, options_.chunk_bytes, warmup,
                                 transport_ != nullptr};
  const DevicePlan& plan =
      plans
          .try_emplace(parameters, make_plan(layout_, parameters, plan_options), options_.rank,
                       received, device_)
          .first->second;
  plan.use_on(finish_stream_);
  const std::lock_guard lock(mutex_);
  ++stats_.workspace_allocations;
  return plan;
}

c10::Event DeviceEngine::take_event() {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) return c10::Event(device_.type());
  c10::Event event = std::move(events_.back());
  events_.pop_back();
  return event;
}

void DeviceEngine::give_back(c10::Event event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
}

// --- between steps
// ---------------------------------------------------------------------------------

void DeviceEngine::pass(const std::vector<uint32_t>& parameters) {
  const std::lock_guard lock(mutex_);
  steps_.pass(parameters);
}

uint64_t DeviceEngine::current_step() const {
  const std::lock_guard lock(mutex_);
  return steps_.step();
}

EngineStats DeviceEngine::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.steps = steps_.step();
  stats.step_buckets = steps_.finished();
  stats.times = log_.totals();
  if (transport_) stats.wire_bytes = transport_->sent_bytes();
  return stats;
}

// `what` is to be done. With mutex_ held.
void DeviceEngine::expect_between_steps(const char* what) const {
  if (death_) throw Error(*death_);
  const size_t seen = steps_.num_seen(), all = steps_.num_parameters();
  GRADFERRY_EXPECTS(stats_.in_flight == 0 && (seen == 0 || seen == all), kState,
                    std::string("cannot ") + what + " in the middle of step " +
                        std::to_string(steps_.step()) + ": " + std::to_string(seen) + " of " +
                        std::to_string(all) + " gradients were handed over, " +
                        std::to_string(stats_.in_flight) +
                        " buckets are in flight; do it after backward() returned");
}

EngineState DeviceEngine::state() {
  const std::lock_guard lock(mutex_);
  expect_between_steps("save the state");
  const at::Tensor nothing = at::empty({0}, at::TensorOptions().dtype(at::kFloat));
  if (!residuals_) return {steps_.finished_steps(), nothing, nothing, 0.0F};
  const c10::StreamGuard guard = behind_all();
  residuals_->settle(finish_stream_);
  const at::Tensor found = findings_.cpu();
  const auto* findings = static_cast<const Findings*>(found.const_data_ptr());
  if (const auto status = static_cast<WireStatus>(findings->status); status != WireStatus::kOk) {
    throw Error(ErrorKind::kProtocol,
                describe({status, static_cast<Phase>(findings->phase), findings->rank,
                          findings->chunk, findings->expected, findings->received},
                         options_.rank, findings->step));
  }
  return {steps_.finished_steps(), residuals_->worker_copy(), residuals_->owner_copy(),
          residuals_->loss_scale()};
}

void DeviceEngine::load_state(const EngineState& state) {
  const std::lock_guard lock(mutex_);
  expect_between_steps("load a state");
  if (residuals_) {
    const c10::StreamGuard guard = behind_all();
    residuals_->load(state.worker_residual, state.owner_residual, state.loss_scale);
    finish_stream_.synchronize();
  }
  steps_.resume(state.steps);
  optimizer_steps_.reset();
  // Of steps that this one does not follow.
  commit_.reset();
  uncommitted_step_.reset();
}

void DeviceEngine::scale_residuals(float factor) {
  const std::lock_guard lock(mutex_);
  expect_between_steps("scale residuals");
  if (!residuals_) return;
  const c10::StreamGuard guard = behind_all();
  residuals_->settle(finish_stream_);
  residuals_->scale(factor);
  finish_stream_.synchronize();
}

void DeviceEngine::skip_step() {
  const std::lock_guard lock(mutex_);
  expect_between_steps("skip a step");
  GRADFERRY_EXPECTS(options_.exact_skip, kState,
                    "a step can be skipped without loss only with exact_skip=True");
  if (!residuals_ || !steps_.began() || options_.in_warmup(steps_.step())) return;
  expect_known_step(optimizer_steps_);
  const c10::StreamGuard guard = behind_all();
  residuals_->skip(finish_stream_);
  finish_stream_.synchronize();
  optimizer_steps_.reset();
}

void DeviceEngine::add_to_worker_residual(uint32_t parameter, const at::Tensor& values,
                                          float factor) {
  const std::lock_guard lock(mutex_);
  expect_between_steps("change a residual");
  const Parameter& target = parameter_to_change(layout_, parameter, values, device_);
  const c10::StreamGuard guard = behind_all();
  residuals_->settle(finish_stream_);
  residuals_->add_to_worker(target.worker_residual, values, factor, options_.loss_scale);
  finish_stream_.synchronize();
}

// F is current, and behind everything that was enqueued.
c10::StreamGuard DeviceEngine::behind_all() const {
  c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
  encode_stream_.synchronize();
  finish_stream_.synchronize();
  return c10::StreamGuard(finish_stream_);
}

}  // namespace gradferry
