#include "device_engine.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>

#include "scalar_type.h"

namespace gradferry {
namespace {

constexpr uint32_t kLeastChunkBytes = kTileElements * sizeof(double);

c10::Stream new_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

}  // namespace

DeviceEngine::DeviceEngine(EngineOptions options, c10::Device device,
                           std::unique_ptr<DeviceTransport> transport)
    : options_(std::move(options)),
      device_(device),
      layout_(options_.parameters, options_.rank, options_.world_size, Device::kCuda),
      process_id_(getpid()),
      encode_stream_(new_stream(device)),
      finish_stream_(new_stream(device)),
      transport_(std::move(transport)),
      commit_done_(device.type()),
      steps_(layout_.parameters().size()) {
  GRADFERRY_EXPECTS(options_.chunk_bytes >= kLeastChunkBytes, kConfig,
                    "chunk_bytes is " + std::to_string(options_.chunk_bytes) +
                        "; it must be at least " + std::to_string(kLeastChunkBytes));
}

std::shared_ptr<DeviceEngine> DeviceEngine::start(EngineOptions options, c10::Device device,
                                                  std::unique_ptr<DeviceTransport> transport) {
  GRADFERRY_EXPECTS(device.has_index(), kConfig, "the device has no index");
  std::shared_ptr<DeviceEngine> engine(
      new DeviceEngine(std::move(options), device, std::move(transport)));
  if (!engine->transport_) return engine;
  engine->allocate();
  engine->load_kernels();
  if (!engine->transport_->waits()) return engine;
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

// Memory that both streams use for as long as it lives.
at::Tensor DeviceEngine::make_tensor(uint64_t num_bytes) const {
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  at::Tensor tensor = at::zeros({static_cast<int64_t>(num_bytes)}, options);
  use_on_both_streams(tensor);
  return tensor;
}

void DeviceEngine::use_on_both_streams(const at::Tensor& tensor) const {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), encode_stream_);
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), finish_stream_);
}

DeviceBuffer DeviceEngine::make_buffer(uint64_t num_bytes) const {
  DeviceBuffer buffer{make_tensor(num_bytes), {}};
  if (transport_->waits()) {
    buffer.host = at::zeros({static_cast<int64_t>(num_bytes)},
                            at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  }
  return buffer;
}

void DeviceEngine::allocate() {
  const c10::StreamGuard guard(finish_stream_);
  residuals_.emplace(layout_, /*keep_copy=*/false, device_);
  use_on_both_streams(residuals_->worker_tensor());
  use_on_both_streams(residuals_->owner_tensor());
  stats_.residual_bytes = residuals_->num_bytes();
  residual_scale_ = make_tensor(sizeof(float)).view(at::kFloat);
  gain_ = make_tensor(sizeof(float)).view(at::kFloat);
  findings_ = make_tensor(sizeof(Findings));
  sums_ = make_tensor(uint64_t{options_.world_size} * sizeof(uint32_t));
  verdicts_ = make_tensor(uint64_t{options_.world_size} * sizeof(uint32_t));

  const uint64_t message_bytes =
      sizeof(MessageHeader) +
      std::min<uint64_t>(options_.chunk_bytes, layout_.largest_shard_bytes());
  GRADFERRY_EXPECTS(message_bytes * options_.world_size <= UINT32_MAX, kConfig,
                    "chunk_bytes times the world size exceeds 4 GiB; choose smaller chunks");
  const uint64_t all = message_bytes * options_.world_size;
  for (size_t i = 0; i < kDeviceSlots; ++i) {
    slots_.push_back({make_buffer(all), make_buffer(all), make_buffer(message_bytes),
                      make_buffer(all), c10::Event(device_.type())});
    stats_.workspace_bytes += 3 * all + message_bytes;
  }
  const uint64_t records = sizeof(CommitRecord) * options_.world_size;
  commit_send_ = make_buffer(sizeof(CommitRecord));
  commit_receive_ = make_buffer(records + sizeof(uint64_t));
  commit_result_ = at::zeros({static_cast<int64_t>(records + sizeof(uint64_t))},
                             at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  stats_.workspace_bytes += 2 * records + 2 * sizeof(CommitRecord);
  stats_.workspace_allocations = kDeviceSlots + 1;
  // E must not see memory before it was zeroed; from here on events see to the order.
  finish_stream_.synchronize();
}

void DeviceEngine::raise(const Error& error) const {
  std::rethrow_exception(options_.make_exception(error));
}

void DeviceEngine::run(const std::vector<uint32_t>& parameters, const at::Tensor& gradient,
                       FuturePtr future, c10::IValue value) {
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
  if (getpid() != process_id_) {
    raise(Error(ErrorKind::kState,
                "gradferry was attached in process " + std::to_string(process_id_) +
                    " and called after a fork in process " + std::to_string(getpid()) +
                    "; attach in the process that trains"));
  }
  const std::lock_guard lock(mutex_);
  if (death_) raise(*death_);
}

void DeviceEngine::fail(const std::exception_ptr& failure, const FuturePtr& future) {
  const std::lock_guard lock(mutex_);
  if (!death_) {
    const Error error = describe_failure(failure, options_.rank);
    death_ = Error(error.kind(), error.what() + log_.text(options_.rank));
  }
  if (future) future->setErrorIfNeeded(options_.make_exception(*death_));
}

DeviceEngine::BucketJob DeviceEngine::make_job(const std::vector<uint32_t>& parameters,
                                               const at::Tensor& gradient, FuturePtr future,
                                               c10::IValue value) {
  bool begins_step = false;
  uint64_t step = 0, number = 0;
  {
    const std::lock_guard lock(mutex_);
    begins_step = steps_.add(parameters);
    step = steps_.step();
    number = stats_.buckets;
  }
  const DevicePlan& plan = plan_for(parameters, step < options_.warmup_steps);
  check_gradient(plan.plan(), gradient);
  c10::Event ready = take_event();
  ready.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  BucketEvent event{.step = step,
                    .bucket = number,
                    .chunks = plan.chunks().size(),
                    .gradient_bytes = gradient.nbytes(),
                    .begin_ns = EventLog::now()};
  return {&plan,
          gradient,
          std::move(future),
          std::move(value),
          std::move(ready),
          step,
          number,
          begins_step,
          event,
          {}};
}

void DeviceEngine::submit(BucketJob job) {
  if (!transport_) {
    GRADFERRY_EXPECTS(!options_.raise_nonfinite || at::isfinite(job.gradient).all().item<bool>(),
                      kState,
                      "a gradient is not finite at step " + std::to_string(job.step) +
                          "; lower the learning rate or the loss scale");
    job.future->markCompleted(std::move(job.value));
    give_back(std::move(job.ready));
    return;
  }
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

const DevicePlan& DeviceEngine::plan_for(const std::vector<uint32_t>& parameters, bool dense) {
  auto& plans = plans_[dense];
  const auto found = plans.find(parameters);
  if (found != plans.end()) return found->second;
  std::vector<std::byte*> received;
  for (const DeviceSlot& slot : slots_) {
    received.push_back(static_cast<std::byte*>(slot.scatter_receive.device.mutable_data_ptr()));
  }
  // Read by E, and by F only behind E.
  const c10::StreamGuard guard(encode_stream_);
  const PlanOptions plan_options{options_.rank, options_.chunk_bytes, dense, transport_ != nullptr};
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
  if (!transport_) return {steps_.finished_steps(), nothing, nothing, 0.0F};
  encode_stream_.synchronize();
  finish_stream_.synchronize();
  const at::Tensor found = findings_.cpu();
  const auto* findings = static_cast<const Findings*>(found.const_data_ptr());
  if (const auto status = static_cast<WireStatus>(findings->status); status != WireStatus::kOk) {
    throw Error(ErrorKind::kProtocol,
                describe({status, static_cast<Phase>(findings->phase), findings->rank,
                          findings->chunk, findings->expected, findings->received},
                         options_.rank, findings->step));
  }
  return {steps_.finished_steps(), residuals_->worker_tensor().cpu(),
          residuals_->owner_tensor().cpu(), residual_scale_.cpu().item<float>()};
}

void DeviceEngine::load_state(const EngineState& state) {
  const std::lock_guard lock(mutex_);
  expect_between_steps("load a state");
  if (transport_) {
    encode_stream_.synchronize();
    const c10::StreamGuard guard(finish_stream_);
    residuals_->load(state.worker_residual, state.owner_residual, state.loss_scale);
    residual_scale_.fill_(state.loss_scale);
    finish_stream_.synchronize();
  }
  steps_.resume(state.steps);
  // Of steps that this one does not follow.
  commit_.reset();
  uncommitted_step_.reset();
}

void DeviceEngine::scale_residuals(float factor) {
  const std::lock_guard lock(mutex_);
  expect_between_steps("scale residuals");
  if (!transport_) return;
  encode_stream_.synchronize();
  const c10::StreamGuard guard(finish_stream_);
  residuals_->scale(factor);
  finish_stream_.synchronize();
}

void DeviceEngine::skip_step() {
  throw Error(ErrorKind::kState,
              "a step can be skipped without loss only with exact_skip=True, which is not "
              "available on a device in this version");
}

void DeviceEngine::add_to_worker_residual(uint32_t /*parameter*/, const at::Tensor& /*values*/,
                                          float /*factor*/) {
  throw Error(ErrorKind::kState,
              "a worker residual carries momentum only in momentum mode, which is not available on "
              "a device in this version");
}

}  // namespace gradferry
