#include "device/device_engine.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <utility>

#include "device/device_context.h"
#include "engine_errors.h"

namespace gradferry {
namespace {

// Tells the transport where a bucket's collectives begin and end.
struct BucketBracket {
  explicit BucketBracket(DeviceTransport& of) : transport(of) { transport.begin_bucket(); }
  ~BucketBracket() { transport.end_bucket(); }
  BucketBracket(const BucketBracket&) = delete;
  BucketBracket& operator=(const BucketBracket&) = delete;
  DeviceTransport& transport;
};

}  // namespace

DeviceEngine::DeviceEngine(EngineOptions options, c10::Device device, ParameterHashes hashes,
                           std::unique_ptr<DeviceTransport> transport)
    : BucketEngine(std::move(options), std::move(hashes), device,
                   /*exchanges=*/transport != nullptr),
      context_(options_, layout_, life_, device, std::move(transport)) {
  if (begins_with_residuals()) make_residuals();
}

void DeviceEngine::make_residuals() {
  if (exchange_) return;
  try {
    context_.make_residuals();
    exchange_.emplace(context_, exchanges_ ? DeviceCommits::workspace_bytes(options_, layout_) : 0);
    if (exchanges_) commits_.emplace(context_, hashes_);
    // E must not use memory before it was zeroed. From here on events ensure the order.
    context_.finish_stream.synchronize();
    load_kernels(context_);
  } catch (...) {  // a user may go on without the state that needed them
    commits_.reset();
    exchange_.reset();
    context_.residuals.reset();
    throw;
  }
}

std::shared_ptr<DeviceEngine> DeviceEngine::start(EngineOptions options, c10::Device device,
                                                  ParameterHashes hashes,
                                                  std::unique_ptr<DeviceTransport> transport) {
  GRADFERRY_EXPECTS(device.has_index(), kConfig, "the device has no index");
  std::shared_ptr<DeviceEngine> engine(
      new DeviceEngine(std::move(options), device, std::move(hashes), std::move(transport)));
  if (!engine->exchanges_ || !engine->context_.transport->waits()) return engine;
  engine->worker_ = Worker::start("gf-staged", BackgroundThread::Role::kEngine);
  // The handle's last copy stops the thread; its last act holds the engine until then.
  return {engine.get(), [engine](DeviceEngine*) {
            if (getpid() != engine->process_id_) return;  // a forked child has no such thread
            engine->worker_->stop([engine] {
              const std::lock_guard lock(engine->life_.mutex);
              engine->context_.transport->close(engine->life_.death.has_value());
            });
          }};
}

// A forked child has no threads that closing a lane could wait for.
DeviceEngine::~DeviceEngine() {
  if (!context_.transport || worker_) return;
  if (getpid() == process_id_) {
    context_.transport->close(life_.death.has_value());
  } else {
    context_.transport->leak();
  }
}

// --- a bucket, on DDP's thread ---

void DeviceEngine::exchange(Bucket bucket) {
  expect_no_capture();
  if (exchanges_) count_in(bucket);
  DeviceJob job = make_job(std::move(bucket));
  if (!exchanges_) {
    complete_alone(std::move(job));
  } else if (worker_) {
    exchange_later(std::move(job));
  } else {
    exchange(job);
  }
}

bool DeviceEngine::decode_kept(const BucketPlan& plan, const at::Tensor& gradient) {
  if (!options_.keep_gathered || !plans_.contains(&plan)) return false;
  const FuturePtr future = make_future(c10::TensorType::get(), gradient);
  DeviceJob job =
      make_job({.plan = &plan, .gradient = gradient, .future = future, .value = gradient});
  job.is_kept = true;
  if (worker_) {
    exchange_later(std::move(job));
  } else {
    exchange(job);
  }
  future->waitAndThrow();  // the current stream waits
  return true;
}

// A graph would replay the numbers of one step; and events of captured work cannot be queried.
void DeviceEngine::expect_no_capture() const {
  if (!context_.residuals) return;  // nothing will be enqueued
  const c10::DeviceGuard guard(device_);
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  GRADFERRY_EXPECTS(!is_capturing(current.native_handle()), kConfig,
                    "the backward pass is being captured into a graph, which the hook does not "
                    "support: each replay would send the messages of the same step; run backward() "
                    "outside of torch.cuda.graph(), capture the forward pass or the optimizer "
                    "alone, or attach with codec='off'");
}

DeviceJob DeviceEngine::make_job(Bucket bucket) {
  c10::Event ready = take_event();
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  ready.record(current);
  return {.plan = exchange_ ? &plan_for(*bucket.plan, bucket.step) : nullptr,
          .gradient = std::move(bucket.gradient),
          .future = std::move(bucket.future),
          .value = std::move(bucket.value),
          .ready = std::move(ready),
          .step = bucket.step,
          .begins_step = bucket.begins_step,
          .begins_momentum = bucket.begins_momentum,
          .begins_check = bucket.begins_check,
          .is_kept = false,
          .event = bucket.event,
          .profiler = {}};
}

// There are other plans for warm-up steps, so that the factors of a plan's codecs stay the same.
const DevicePlan& DeviceEngine::plan_for(const BucketPlan& plan, uint64_t step) {
  const auto found = plans_.find(&plan);
  if (found != plans_.end()) return found->second;
  std::vector<ChunkCodec> codecs;
  for (const ResolvedCodec& resolved : layout_.codecs()) {
    codecs.push_back({row_of(*resolved.codec), options_.alpha(resolved, step),
                      options_.beta(resolved, step), resolved.options});
  }
  // Read by E, and by F only behind E.
  const c10::StreamGuard guard(context_.encode_stream);
  const DevicePlan& added = plans_
                                .try_emplace(&plan, plan, layout_, codecs, exchange_->sum_begin(),
                                             options_.collective, device_)
                                .first->second;
  added.use_on(context_.finish_stream);
  return added;
}

// Events are reused, because creating one may wait for the device.
c10::Event DeviceEngine::take_event() {
  const std::lock_guard lock(life_.mutex);
  if (events_.empty()) return c10::Event(device_.type());
  c10::Event event = std::move(events_.back());
  events_.pop_back();
  return event;
}

void DeviceEngine::give_back(c10::Event event) {
  const std::lock_guard lock(life_.mutex);
  events_.push_back(std::move(event));
}

void DeviceEngine::exchange_later(DeviceJob job) {
  const auto shared = std::make_shared<DeviceJob>(std::move(job));
  const bool added = worker_->add([this, shared] {
    try {
      {
        const std::lock_guard lock(life_.mutex);
        if (life_.death) throw Error(*life_.death);
      }
      const ProfilerContext::Guard profiled(shared->profiler);
      exchange(*shared);
    } catch (...) {
      fail(describe_failure(std::current_exception(), options_.world_rank()));
      shared->future->setErrorIfNeeded(options_.exception_of(*life_.death));
    }
  });
  if (!added) throw called_at_exit();
}

// --- on DDP's thread, or the engine's with a transport that waits ---

void DeviceEngine::exchange(DeviceJob& job) {
  const c10::DeviceGuard guard(device_);
  if (job.is_kept) {
    job.ready.block(context_.finish_stream);
    give_back(std::move(job.ready));
    exchange_->decode_kept(job);
    complete(job);
    return;
  }
  const BucketBracket bracket(*context_.transport);
  job.ready.block(context_.encode_stream);
  give_back(std::move(job.ready));
  if (job.begins_step) {
    last_pass_.record(context_.finish_stream);
    last_pass_.block(context_.encode_stream);
    commits_->begin_step(job);
    begin_step(job);
  }
  commits_->note_step(job.step);
  exchange_->enqueue(job);
  {
    const std::lock_guard lock(life_.mutex);
    --life_.stats.in_flight;
  }
  job.event.encoded_ns = job.event.complete_ns = EventLog::now();
  log_.add(job.event);
  complete(job);
}

void DeviceEngine::complete(DeviceJob& job) const {
  const c10::StreamGuard finish(context_.finish_stream);
  job.gradient.reset();
  // A Future registers storages with the streams that wait for it: here not the gradient's.
  std::optional<std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>> registered;
  if (!gathers(options_.collective)) {
    registered.emplace({context_.findings.storage().getWeakStorageImpl()});
  }
  job.future->markCompleted(std::move(job.value), std::move(registered));
}

// On E, which has waited for F: in a pass that was abandoned nobody waits for its Futures, so that
// the next gradient may come while F still uses the residuals.
void DeviceEngine::begin_step(const DeviceJob& job) {
  if (job.begins_momentum) {
    const c10::StreamGuard guard(context_.encode_stream);
    context_.residuals->scale_by_parameter(layout_, alphas());
  }
  if (!options_.touches_residuals(job.step)) return;
  context_.residuals->begin_pass(options_.loss_scale, context_.encode_stream);
}

// Nothing is sent.
void DeviceEngine::complete_alone(DeviceJob job) {
  const bool changes = context_.residuals && options_.touches_residuals(job.step);
  if (changes) {
    const c10::DeviceGuard guard(device_);
    job.ready.block(context_.encode_stream);
    if (job.begins_step) begin_step(job);
    exchange_->deliver_alone(job);
  }
  give_back(std::move(job.ready));
  const c10::OptionalStreamGuard guard(changes ? std::optional(context_.encode_stream)
                                               : std::nullopt);
  if (options_.raise_nonfinite && !at::isfinite(job.gradient).all().item<bool>()) {
    throw nonfinite_gradient(job.step);
  }
  job.future->markCompleted(std::move(job.value));
}

// --- between steps ---

uint64_t DeviceEngine::sent_bytes() const {
  return exchanges_ ? context_.transport->sent_bytes() : 0;
}

uint64_t DeviceEngine::local_bytes() const {
  return exchanges_ ? context_.transport->local_bytes() : 0;
}

void DeviceEngine::expect_no_fault() {
  if (!commits_) return;
  const c10::StreamGuard guard = behind_all();
  commits_->expect_no_fault();
}

// Waits on the host for everything that was enqueued, and makes F current.
c10::StreamGuard DeviceEngine::behind_all() const {
  c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
  context_.encode_stream.synchronize();
  context_.finish_stream.synchronize();
  return c10::StreamGuard(context_.finish_stream);
}

SavedResiduals DeviceEngine::save_residuals(const SavedResiduals& kept) {
  if (!context_.residuals) {
    const at::Tensor nothing = at::empty({0}, at::TensorOptions().dtype(at::kFloat));
    return {nothing, nothing, 0.0F};
  }
  DeviceResiduals& residuals = *context_.residuals;
  const c10::StreamGuard guard = behind_all();
  if (commits_) commits_->expect_no_fault();
  return {copy_residual(residuals.worker_tensor(), kept.worker),
          copy_residual(residuals.owner_tensor(), kept.owner), residuals.loss_scale()};
}

void DeviceEngine::load_residuals(const SavedResiduals& saved) {
  if (context_.residuals) {
    const c10::StreamGuard guard = behind_all();
    const float units = saved.loss_scale;
    // Without a scaler the units are those of the gradients themselves, from here on.
    const bool converts = !options_.loss_scale.defined() && units != 0.0F && units != 1.0F;
    context_.residuals->load(saved.worker, saved.owner, converts ? 1.0F : units);
    if (converts) context_.residuals->scale(1.0F / units);
    context_.finish_stream.synchronize();
  }
  if (commits_) commits_->forget();
}

// make_residuals() was called before.
void DeviceEngine::change_worker_residual(uint64_t offset, const at::Tensor& values, float factor) {
  const c10::StreamGuard guard = behind_all();
  context_.residuals->add_to_worker(offset, values, factor, options_.loss_scale);
  context_.finish_stream.synchronize();
}

void DeviceEngine::multiply_residuals(float factor) {
  if (!context_.residuals) return;
  const c10::StreamGuard guard = behind_all();
  context_.residuals->scale(factor);
  context_.finish_stream.synchronize();
}

// With momentum the engine has residuals.
void DeviceEngine::begin_momentum() {
  const c10::StreamGuard guard = behind_all();
  context_.residuals->scale_by_parameter(layout_, alphas());
  context_.finish_stream.synchronize();
}

}  // namespace gradferry
