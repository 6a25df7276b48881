#include "host/host_engine.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "background_thread.h"
#include "engine_errors.h"
#include "host/node_sum.h"
#include "protocol/faults.h"
#include "tensor_bytes.h"

namespace gradferry {
namespace {

// The size of all owners' messages, with one rank per node.
int64_t gathered_bytes(const ChunkPlan& chunk) {
  const Rail& rail = chunk.rails.front();
  return static_cast<int64_t>(rail.gather_message_bytes * rail.owner_bytes.size());
}

}  // namespace

HostEngine::HostEngine(EngineOptions options, ParameterHashes hashes, ExchangeLanes lanes,
                       const std::shared_ptr<SharedMemory>& memory, std::string local_stage)
    : BucketEngine(std::move(options), std::move(hashes), c10::kCPU,
                   /*exchanges=*/lanes.commit != nullptr),
      local_stage_(std::move(local_stage)),
      sample_(layout_),
      residuals_(layout_),
      codecs_(options_, layout_, residuals_) {
  if (begins_with_residuals()) make_residuals();
  GRADFERRY_EXPECTS(exchanges_ == (options_.world_size > 1), kConfig,
                    "an engine for " + std::to_string(options_.world_size) +
                        " ranks needs lanes, and one for a single rank has none");
  if (!exchanges_) return;
  exchange_.emplace(options_.agreement(), layout_.nodes(), *options_.peers, std::move(lanes));
  pipeline_.emplace(options_, layout_, residuals_, sample_, *exchange_, memory.get(), log_, life_);
}

std::shared_ptr<HostEngine> HostEngine::start(EngineOptions options, ParameterHashes hashes,
                                              ExchangeLanes lanes,
                                              const std::shared_ptr<SharedMemory>& memory,
                                              std::string local_stage) {
  std::shared_ptr<HostEngine> engine(new HostEngine(
      std::move(options), std::move(hashes), std::move(lanes), memory, std::move(local_stage)));
  if (engine->pipeline_) {
    BackgroundThread::start(
        "gf-finish", BackgroundThread::Role::kEngine,
        [engine] { engine->exchange_->close(engine->pipeline_->work()); },
        [weak = std::weak_ptr(engine)] {
          if (const auto alive = weak.lock()) alive->request_stop();
        });
  }
  // The handle's last copy stops the engine; the finishing thread keeps the object until it ends.
  return {engine.get(), [engine](HostEngine*) { engine->request_stop(); }};
}

// --- a bucket, on DDP's thread ---

void HostEngine::exchange(Bucket bucket) {
  if (bucket.begins_step) begin_step(bucket);
  if (!exchanges_ || bucket.plan->chunks.empty()) {
    complete_alone(std::move(bucket));
    return;
  }
  Fault fault;
  if (std::exchange(check_is_due_, false)) fault = check_parameters(bucket.step);
  count_in(bucket);
  const float sent_scale = options_.loss_scale.defined() ? pass_scale_ : 0.0F;
  UsedMap used;
  UnusedCopy unused;
  if (options_.find_unused_parameters) {
    used = bucket.used.empty() ? UsedMap(bucket.plan->parameters.size(), 1) : bucket.used;
    unused = copy_unused(bucket, used);
  }
  const auto job = std::make_shared<BucketJob>(BucketJob{.plan = bucket.plan,
                                                         .gradient = std::move(bucket.gradient),
                                                         .future = std::move(bucket.future),
                                                         .value = std::move(bucket.value),
                                                         .step = bucket.step,
                                                         .loss_scale = sent_scale,
                                                         .fault = fault,
                                                         .local_error = {},
                                                         .nonfinite_tiles = {},
                                                         .used = std::move(used),
                                                         .unused = std::move(unused),
                                                         .event = bucket.event,
                                                         .profiler = {}});
  const at::Tensor kept = options_.keep_gathered ? kept_messages(*job->plan) : at::Tensor();
  const auto& chunks = job->plan->chunks;
  int64_t begin = 0;
  for (const ChunkPlan& chunk : chunks) {
    const int64_t size = gathered_bytes(chunk);
    send_chunk(job, chunk, &chunk == &chunks.back(),
               kept.defined() ? kept.narrow(0, begin, size) : at::Tensor());
    begin += size;
  }
}

// Called before the step's first bucket reaches a codec; residuals of the last step are complete.
void HostEngine::begin_step(const Bucket& bucket) {
  const std::lock_guard lock(life_.mutex);
  if (bucket.begins_momentum) begin_momentum();
  check_is_due_ = check_is_due_ || bucket.begins_check;
  pass_scale_ = loss_scale();
  if (changes_residuals(bucket.step)) residuals_.begin_pass(pass_scale_);
}

// All ranks see the same hashes, so all of them throw, or none.
Fault HostEngine::check_parameters(uint64_t step) {
  std::vector<std::vector<uint64_t>> by_rank;
  const uint64_t next_chunk = life_.stats.chunks;  // only this thread writes it
  const Fault fault = exchange_->gather_hashes(hashes_.compute(), step, next_chunk, by_rank);
  if (fault) return fault;  // the bucket's commit tells the others
  expect_equal_hashes(by_rank, layout_, step, *options_.peers);
  return {};
}

// No earlier bucket with the same parameters is in flight any more.
UnusedCopy HostEngine::copy_unused(const Bucket& bucket, const UsedMap& used) const {
  const bool touched = changes_residuals(bucket.step);
  return {layout_,
          bucket.plan->parameters,
          used,
          bucket.gradient,
          touched ? residuals_.worker_tensor() : at::Tensor(),
          touched ? residuals_.owner_tensor() : at::Tensor()};
}

bool HostEngine::changes_residuals(uint64_t step) const {
  return residuals_.is_allocated() && options_.touches_residuals(step);
}

// Nothing is sent.
void HostEngine::complete_alone(Bucket bucket) {
  if (changes_residuals(bucket.step)) deliver_alone(bucket);
  if (options_.raise_nonfinite && !is_finite(bucket)) throw nonfinite_gradient(bucket.step);
  bucket.future->markCompleted(std::move(bucket.value));
}

// Whether all is that DDP does not drop.
bool HostEngine::is_finite(const Bucket& bucket) const {
  const auto all_finite = [](const at::Tensor& values) {
    return at::isfinite(values).all().item<bool>();
  };
  if (all_finite(bucket.gradient)) return true;
  if (bucket.used.empty()) return false;
  int64_t offset = 0;
  for (size_t i = 0; i < bucket.plan->parameters.size(); ++i) {
    const Parameter& parameter = layout_.parameters()[bucket.plan->parameters[i]];
    const auto size = static_cast<int64_t>(parameter.num_elements);
    if (bucket.used[i] != 0 && !all_finite(bucket.gradient.narrow(0, offset, size))) return false;
    offset += size;
  }
  return true;
}

// DDP drops what comes back for a parameter that was not used.
void HostEngine::deliver_alone(const Bucket& bucket) {
  UnusedCopy unused;
  if (!bucket.used.empty()) unused = copy_unused(bucket, bucket.used);
  for (const ChunkPlan& chunk : bucket.plan->chunks) {
    void* gradient = bucket.gradient.mutable_data_ptr();
    codecs_.deliver_alone({&chunk, bucket.step, gradient, gradient});
  }
  unused.put_back(bucket.used);
}

// Posts what the others wait for first, so that it is sent while the next chunk is prepared. DDP's
// thread waits for the network only if all slots are in use.
void HostEngine::send_chunk(const std::shared_ptr<BucketJob>& bucket, const ChunkPlan& plan,
                            bool last, at::Tensor kept) {
  auto job = std::make_unique<ChunkJob>();
  job->bucket = bucket;
  job->last = last;
  job->chunk.plan = &plan;
  job->chunk.slot = pipeline_->take_slot();
  job->chunk.gathered = kept.defined() ? std::move(kept) : job->chunk.slot->gathered;
  job->chunk.step = bucket->step;
  job->chunk.number = life_.stats.chunks;  // only this thread writes it
  if (!scatters(options_.collective)) {
    pipeline_->send_to_all(*job, codecs_);
  } else if (layout_.nodes().is_flat()) {
    pipeline_->send_to_peers(*job, codecs_, WireStatus::kOk);
  } else {
    send_to_siblings(*job);
  }
  {
    const std::lock_guard lock(life_.mutex);
    ++life_.stats.chunks;
    bucket->event.encoded_ns = EventLog::now();
  }
  pipeline_->hand_in(std::move(job));
}

// Where the messages of a bucket are kept, chunk by chunk. Allocated when it comes for the first
// time.
at::Tensor HostEngine::kept_messages(const BucketPlan& plan) {
  at::Tensor& kept = kept_[&plan];
  if (kept.defined()) return kept;
  int64_t num_bytes = 0;
  for (const ChunkPlan& chunk : plan.chunks) num_bytes += gathered_bytes(chunk);
  kept = at::zeros({num_bytes}, at::TensorOptions().dtype(at::kByte));
  const std::lock_guard lock(life_.mutex);
  life_.stats.workspace_bytes += kept.nbytes();
  ++life_.stats.workspace_allocations;
  return kept;
}

bool HostEngine::decode_kept(const BucketPlan& plan, const at::Tensor& gradient) {
  const auto found = kept_.find(&plan);
  if (found == kept_.end()) return false;
  const std::byte* messages = bytes(found->second);
  void* into = gradient.mutable_data_ptr();
  for (const ChunkPlan& chunk : plan.chunks) {
    codecs_.decode({&chunk, 0, into, into}, messages, nullptr);
    messages += gathered_bytes(chunk);
  }
  return true;
}

void HostEngine::send_to_siblings(ChunkJob& job) {
  const void* gradient = job.bucket->gradient.const_data_ptr();
  const Nodes& nodes = layout_.nodes();
  int64_t encode_ns = 0;
  {
    const TimedRange timed("gradferry::encode", encode_ns);
    for (uint32_t rail = 0; rail < nodes.num_rails(); ++rail) {
      if (rail == nodes.local_index(options_.rank)) continue;  // its leader has it
      pack_rail(*job.chunk.plan, rail, gradient, exchange_->dense_message(job.chunk, rail));
    }
  }
  exchange_->post_local_scatter(job.chunk, WireStatus::kOk);
  const std::lock_guard lock(life_.mutex);
  job.bucket->event.encode_ns += encode_ns;
}

// --- between steps ---

float HostEngine::loss_scale() const {
  if (!options_.loss_scale.defined()) return 1.0F;
  const auto scale = *options_.loss_scale.const_data_ptr<float>();
  GRADFERRY_EXPECTS(is_loss_scale(std::bit_cast<uint32_t>(scale)), kState,
                    "the GradScaler's scale is " + std::to_string(scale) + kUnsoundLossScale);
  return scale;
}

SavedResiduals HostEngine::save_residuals(const SavedResiduals& kept) {
  return {copy_residual(residuals_.worker_tensor(), kept.worker),
          copy_residual(residuals_.owner_tensor(), kept.owner), residuals_.loss_scale()};
}

void HostEngine::make_residuals() {
  if (residuals_.is_allocated()) return;
  residuals_.allocate();
  life_.stats.residual_bytes = residuals_.num_bytes();
}

void HostEngine::load_residuals(const SavedResiduals& saved) {
  if (!residuals_.is_allocated()) return;  // there are none
  residuals_.load(saved.worker, saved.owner, saved.loss_scale);
}

void HostEngine::change_worker_residual(uint64_t offset, const at::Tensor& values, float factor) {
  residuals_.add_to_worker(offset, values, factor, loss_scale());
}

void HostEngine::multiply_residuals(float factor) { residuals_.scale(factor); }

void HostEngine::begin_momentum() { residuals_.scale_by_parameter(layout_, alphas()); }

}  // namespace gradferry
