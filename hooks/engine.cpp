#include "engine.h"

#include <ATen/Functions.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "scalar_type.h"

namespace gradferry {
namespace {

// A full tile of the widest dtype must fit.
constexpr uint32_t kLeastChunkBytes = kTileElements * sizeof(double);

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Engine>> engines;
};

// Never destroyed: finishing threads may outlive static destruction.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

Engine::Engine(EngineOptions options, ParameterHashes hashes,
               std::vector<c10::intrusive_ptr<c10d::Backend>> backends)
    : options_(std::move(options)),
      layout_(options_.parameters, options_.rank, options_.world_size, Device::kCpu),
      sample_(layout_),
      hashes_(std::move(hashes)),
      process_id_(getpid()),
      residuals_(layout_, options_.exact_skip),
      optimizer_steps_(options_.loss_scale) {
  GRADFERRY_EXPECTS(options_.chunk_bytes >= kLeastChunkBytes, kConfig,
                    "chunk_bytes is " + std::to_string(options_.chunk_bytes) +
                        "; it must be at least " + std::to_string(kLeastChunkBytes));
  const size_t wanted = options_.world_size > 1 ? 3 : 0;
  GRADFERRY_EXPECTS(backends.size() == wanted, kConfig,
                    "an engine for " + std::to_string(options_.world_size) + " ranks takes " +
                        std::to_string(wanted) + " lanes, got " + std::to_string(backends.size()));
  for (auto& backend : backends) {
    GRADFERRY_EXPECTS(static_cast<uint32_t>(backend->getRank()) == options_.rank &&
                          static_cast<uint32_t>(backend->getSize()) == options_.world_size,
                      kConfig, "a lane's rank or size differs from the engine's");
    lanes_.emplace_back(std::move(backend), &wire_bytes_);
  }
  if (wanted != 0) {
    exchange_.emplace(
        Agreement{options_.rank, options_.world_size, options_.config_hash, options_.layout_hash},
        *options_.peers, lanes_[0], lanes_[1], lanes_[2]);
  }
  allocate();
}

void Engine::allocate() {
  stats_.residual_bytes = residuals_.num_bytes();
  seen_in_step_.assign(layout_.parameters().size(), false);
  if (!exchange_) return;

  const uint64_t message_bytes =
      sizeof(MessageHeader) +
      std::min<uint64_t>(options_.chunk_bytes, layout_.largest_shard_bytes());
  expect_offsets_fit(message_bytes, options_.world_size);
  for (size_t i = 0; i < kSlots; ++i) {
    slots_.push_back(make_slot(options_.world_size, message_bytes));
    stats_.workspace_bytes += message_bytes * (3 * options_.world_size + 1);
  }
  for (Slot& slot : slots_) free_slots_.push_back(&slot);
  const auto record = static_cast<int64_t>(
      commit_bytes(options_.find_unused_parameters ? layout_.parameters().size() : 0));
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  for (size_t i = 0; i < kCommitSlots; ++i) {
    commit_slots_.emplace_back(at::zeros({record}, bytes),
                               at::zeros({record * options_.world_size}, bytes));
    stats_.workspace_bytes += record * (options_.world_size + 1);
  }
  checksums_.resize(options_.world_size);
  payloads_.resize(options_.world_size);
  stats_.workspace_allocations = kSlots + kCommitSlots;
}

std::shared_ptr<Engine> Engine::start(EngineOptions options, ParameterHashes hashes,
                                      std::vector<c10::intrusive_ptr<c10d::Backend>> backends) {
  std::shared_ptr<Engine> engine(
      new Engine(std::move(options), std::move(hashes), std::move(backends)));
  if (engine->exchange_) {
    {
      Registry& all = registry();
      const std::lock_guard lock(all.mutex);
      std::erase_if(all.engines, [](const auto& weak) { return weak.expired(); });
      all.engines.push_back(engine);
    }
    std::thread([engine] {
      pthread_setname_np(pthread_self(), "gf-finish");
      engine->finish();
    }).detach();
    std::unique_lock lock(engine->mutex_);
    engine->changed_.wait(lock, [&] { return engine->clean_.has_value(); });
    for (Lane& lane : engine->lanes_) lane.set_thread_local_state(&*engine->clean_);
  }
  // The handle's last copy stops the engine; the finishing thread keeps the object until it ends.
  return {engine.get(), [engine](Engine*) { engine->request_stop(); }};
}

void Engine::request_stop() {
  if (getpid() != process_id_) return;  // a forked child has no finishing thread to tell
  const std::lock_guard lock(mutex_);
  stop_ = true;
  changed_.notify_all();
}

void Engine::shutdown_all(std::chrono::milliseconds timeout) {
  std::vector<std::shared_ptr<Engine>> engines;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    for (const auto& weak : all.engines) {
      if (auto engine = weak.lock(); engine && engine->process_id_ == getpid()) {
        engines.push_back(std::move(engine));
      }
    }
  }
  for (const auto& engine : engines) engine->request_stop();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (const auto& engine : engines) {
    std::unique_lock lock(engine->mutex_);
    engine->changed_.wait_until(lock, deadline, [&] { return engine->ended_; });
  }
}

void Engine::raise(const Error& error) const {
  std::rethrow_exception(options_.make_exception(error));
}

void Engine::run(const std::vector<uint32_t>& parameters, UsedMap used, const at::Tensor& gradient,
                 FuturePtr future, c10::IValue value) {
  begin_run(parameters);
  std::optional<Error> failure;
  try {
    send_bucket(parameters, std::move(used), gradient, std::move(future), std::move(value));
  } catch (...) {
    failure = describe_failure(std::current_exception(), options_.rank);
  }
  // Peers may miss messages then, so nothing can go on.
  if (failure) fail(*failure);
  const std::lock_guard lock(mutex_);
  running_ = false;
  changed_.notify_all();
  if (failure) raise(*death_);
}

void Engine::fail(const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    if (!death_) death_ = finished(error, log_, options_.rank);
    changed_.notify_all();  // the finishing thread ends the engine
  }
  // The finishing thread would tell, too, but it may be waiting for the others.
  options_.peers->tell(death_->what());
}

void Engine::check_gradient(const BucketPlan& plan, const at::Tensor& gradient) const {
  const bool fits =
      gradient.device().is_cpu() && gradient.is_contiguous() &&
      static_cast<uint64_t>(gradient.numel()) == plan.num_elements &&
      (plan.num_elements == 0 || to_scalar_type(gradient.scalar_type()) == plan.dtype);
  GRADFERRY_EXPECTS(fits, kState,
                    "a bucket holds " + std::to_string(gradient.numel()) + " elements of " +
                        c10::toString(gradient.scalar_type()) + " on " + gradient.device().str() +
                        ", other than its " + std::to_string(plan.num_elements) +
                        " elements had at attach; do not wrap the hook in a compress wrapper, and "
                        "do not change parameters after attach");
}

void Engine::send_bucket(const std::vector<uint32_t>& parameters, UsedMap used,
                         const at::Tensor& gradient, FuturePtr future, c10::IValue value) {
  const uint64_t step = stats_.steps;  // only this thread writes it
  const BucketPlan& plan = plan_for(parameters, options_.in_warmup(step));
  check_gradient(plan, gradient);
  if (!step_began_) begin_step();
  auto bucket = std::make_shared<BucketJob>();
  bucket->event = {.step = step,
                   .chunks = plan.chunks.size(),
                   .gradient_bytes = gradient.nbytes(),
                   .begin_ns = EventLog::now()};
  bucket->gradient = gradient;
  bucket->future = std::move(future);
  bucket->value = std::move(value);
  bucket->step = step;
  bucket->gain = gain_;
  bucket->plan = &plan;
  if (!exchange_ || plan.chunks.empty()) {
    run_alone(plan, bucket);
    return;
  }
  if (std::exchange(check_is_due_, false)) bucket->fault = check_parameters(step);
  {
    const std::lock_guard lock(mutex_);
    bucket->number = stats_.buckets++;
    bucket->event.bucket = bucket->number;
    stats_.gradient_bytes += gradient.nbytes();
    ++stats_.in_flight;
  }
  if (options_.find_unused_parameters) keep_unused(*bucket, std::move(used));
  for (const ChunkPlan& chunk : plan.chunks) {
    send_chunk(bucket, chunk, &chunk == &plan.chunks.back());
  }
}

// Of an earlier bucket with the same parameters nothing is in flight any more.
void Engine::keep_unused(BucketJob& bucket, UsedMap used) {
  const auto& parameters = bucket.plan->parameters;
  bucket.used = used.empty() ? UsedMap(parameters.size(), 1) : std::move(used);
  const bool touched = !options_.in_warmup(bucket.step);
  bucket.unused = UnusedCopy(layout_, parameters, bucket.used, bucket.gradient,
                             touched ? residuals_.worker_tensor() : at::Tensor(),
                             touched ? residuals_.owner_tensor() : at::Tensor());
}

// Nothing travels: gradients stay as they are, but for the momentum.
void Engine::run_alone(const BucketPlan& plan, const std::shared_ptr<BucketJob>& bucket) {
  if (options_.has_momentum(bucket->step)) {
    for (const ChunkPlan& chunk : plan.chunks) add_momentum_alone(chunk, bucket);
  }
  if ((options_.raise_nonfinite || options_.exact_skip) &&
      !at::isfinite(bucket->gradient).all().item<bool>()) {
    GRADFERRY_EXPECTS(!options_.raise_nonfinite, kState,
                      "a gradient is not finite at step " + std::to_string(bucket->step) +
                          "; lower the learning rate or the loss scale");
    const std::lock_guard lock(mutex_);
    if (!options_.in_warmup(bucket->step)) step_nonfinite_ = true;
  }
  bucket->future->markCompleted(std::move(bucket->value));
}

void Engine::add_momentum_alone(const ChunkPlan& plan, const std::shared_ptr<BucketJob>& bucket) {
  alignas(kPayloadAlignment) std::byte payload[kTileElements * sizeof(double)];
  ChunkJob job{.bucket = bucket, .chunk = {}, .last = false, .encode_error = {}};
  job.chunk.plan = &plan;
  void* gradient = bucket->gradient.mutable_data_ptr();
  for (const PlannedBatch& planned : plan.encode) {
    const ResolvedCodec& resolved = layout_.codecs()[planned.codec_index];
    const Codec& codec = *resolved.codec;
    TileBatch batch = make_batch(planned, job, Stage::kWorker, encode_status_);
    batch.num_tiles = 1;
    for (Tile tile : planned.tiles) {
      tile.payload_offset = 0;
      batch.tiles = &tile;
      codec.encode(batch, gradient, options_.alpha(resolved, bucket->step), &bucket->gain,
                   residuals_.worker(), payload);
      codec.decode(batch, payload, gradient, options_.beta(resolved), residuals_.worker());
    }
  }
}

void Engine::begin_run(const std::vector<uint32_t>& parameters) {
  if (getpid() != process_id_) raise(called_after_fork(process_id_));
  const std::lock_guard lock(mutex_);
  if (death_) raise(*death_);
  if (stop_) {
    raise(Error(ErrorKind::kState, "gradferry was shut down; it cannot compress at exit"));
  }
  running_ = true;
  note_bucket(parameters);
  current_buckets_.push_back(parameters);
}

void Engine::pass(const std::vector<uint32_t>& parameters) {
  const std::lock_guard lock(mutex_);
  note_bucket(parameters);
}

// Bucket index and is_last are unreliable: a step begins when a parameter comes again.
void Engine::note_bucket(const std::vector<uint32_t>& parameters) {
  const bool again = std::any_of(parameters.begin(), parameters.end(),
                                 [&](uint32_t index) { return seen_in_step_[index]; });
  if (again) {
    ++stats_.steps;
    std::fill(seen_in_step_.begin(), seen_in_step_.end(), false);
    stats_.step_buckets = std::move(current_buckets_);
    current_buckets_.clear();
    step_began_ = false;
  }
  for (const uint32_t index : parameters) seen_in_step_[index] = true;
}

void Engine::begin_step() {
  const std::lock_guard lock(mutex_);
  if (options_.exact_skip && optimizer_steps_.begin_pass(hashes_)) {
    settle();
    step_nonfinite_ = false;
    residuals_.keep();
  }
  step_began_ = true;
  check_is_due_ = options_.check_is_due(stats_.steps);
  if (options_.in_warmup(stats_.steps)) return;
  gain_ = residuals_.begin_pass(loss_scale());
}

// All ranks see the same hashes, so all of them throw, or none.
Fault Engine::check_parameters(uint64_t step) {
  std::vector<std::vector<uint64_t>> by_rank;
  const Fault fault = exchange_->gather_hashes(hashes_.compute(), step, stats_.chunks, by_rank);
  if (fault) return fault;  // the bucket's commit tells the others
  expect_equal_hashes(by_rank, layout_, step);
  return {};
}

const BucketPlan& Engine::plan_for(const std::vector<uint32_t>& parameters, bool warmup) {
  auto& plans = plans_[warmup];
  const auto found = plans.find(parameters);
  if (found != plans.end()) return found->second;
  const PlanOptions plan_options{options_.rank, options_.chunk_bytes, warmup,
                                 exchange_.has_value()};
  const BucketPlan& plan =
      plans.emplace(parameters, make_plan(layout_, parameters, plan_options)).first->second;
  const std::lock_guard lock(mutex_);
  ++stats_.workspace_allocations;
  return plan;
}

Slot* Engine::take_slot() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !free_slots_.empty() || death_; });
  if (death_) raise(*death_);
  Slot* slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

void Engine::send_chunk(const std::shared_ptr<BucketJob>& bucket, const ChunkPlan& plan,
                        bool last) {
  auto job = std::make_unique<ChunkJob>();
  job->bucket = bucket;
  job->last = last;
  job->chunk.plan = &plan;
  job->chunk.slot = take_slot();
  job->chunk.step = bucket->step;
  job->chunk.number = stats_.chunks;  // only this thread writes it
  auto status = WireStatus::kOk;
  int64_t encode_ns = 0;
  ResidualSquares withheld;
  std::fill(checksums_.begin(), checksums_.end(), 0);
  try {
    const TimedRange timed("gradferry::encode", encode_ns);
    encode(*job, checksums_);
    withheld = sample_.worker(plan, bucket->gradient.const_data_ptr(), residuals_.worker());
  } catch (const std::exception& error) {
    // The peers still get messages of the right size; the commit tells them why.
    job->encode_error = error.what();
    status = WireStatus::kLocalFailure;
  }
  exchange_->post_scatter(job->chunk, status, checksums_);
  const std::lock_guard lock(mutex_);
  if (death_) raise(*death_);
  ++stats_.chunks;
  bucket->event.encode_ns += encode_ns;
  bucket->event.worker += withheld;
  bucket->event.encoded_ns = EventLog::now();
  queue_.push_back(std::move(job));
  changed_.notify_all();
}

TileBatch Engine::make_batch(const PlannedBatch& planned, const ChunkJob& job, Stage stage,
                             std::vector<TileStatus>& status) const {
  if (status.size() < planned.tiles.size()) status.resize(planned.tiles.size());
  return {.tiles = planned.tiles.data(),
          .num_tiles = static_cast<uint32_t>(planned.tiles.size()),
          .dtype = job.chunk.plan->dtype,
          .stage = stage,
          .hold_zero_tiles = !options_.has_momentum(job.bucket->step),
          .seed = options_.seed,
          .step = job.bucket->step,
          .options = &layout_.codecs()[planned.codec_index].options,
          .status = status.data(),
          .stream = nullptr};
}

void Engine::encode(const ChunkJob& job, std::vector<uint64_t>& checksums) {
  auto* out = static_cast<std::byte*>(job.chunk.slot->scatter_send.mutable_data_ptr());
  for (const PlannedBatch& planned : job.chunk.plan->encode) {
    const TileBatch batch = make_batch(planned, job, Stage::kWorker, encode_status_);
    const ResolvedCodec& resolved = layout_.codecs()[planned.codec_index];
    resolved.codec->encode(batch, job.bucket->gradient.const_data_ptr(),
                           options_.alpha(resolved, job.bucket->step), &job.bucket->gain,
                           planned.worker_residual ? residuals_.worker() : nullptr, out);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      checksums[planned.ranks[i]] += encode_status_[i].checksum;
    }
  }
}

}  // namespace gradferry
