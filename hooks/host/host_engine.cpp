#include "host/host_engine.h"

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <utility>

#include "background_thread.h"
#include "engine_errors.h"
#include "protocol/faults.h"

namespace gradferry {
namespace {

// Keeps the first fault, except that a cause replaces kPeerTrouble, the echo of another rank's
// error.
void note(Fault& kept, const Fault& fault) {
  if (fault && (!kept || kept.status == WireStatus::kPeerTrouble)) kept = fault;
}

uint64_t commit_record_bytes(const EngineOptions& options) {
  return commit_bytes(options.find_unused_parameters ? options.parameters.size() : 0);
}

uint64_t all_commits_bytes(const EngineOptions& options) {
  return kCommitSlots * commit_record_bytes(options) * uint64_t{options.world_size};
}

Workspace plan_host_workspace(const EngineOptions& options, const Layout& layout,
                              bool siblings_share) {
  // What siblings exchange is no smaller where chunks are.
  const uint32_t most_slots = options.nodes.is_flat() ? options.most_slots : kHostSlots;
  return plan_workspace(layout, options.planning(CodecChoice::kOwn, /*residuals=*/false),
                        {.cap_bytes = options.workspace_cap_bytes,
                         .other_bytes = all_commits_bytes(options),
                         .most_slots = most_slots,
                         .gathers_in_place = true,
                         .siblings_share = siblings_share,
                         .keeps_gathered = options.keep_gathered});
}

}  // namespace

uint64_t shared_memory_bytes(const EngineOptions& options) {
  const Layout layout(options.parameters, options.rank, options.nodes);
  const Workspace workspace = plan_host_workspace(options, layout, /*siblings_share=*/true);
  return workspace.slots * workspace.shared_bytes;
}

HostEngine::HostEngine(EngineOptions options, ParameterHashes hashes, ExchangeLanes lanes,
                       const std::shared_ptr<SharedMemory>& memory, std::string local_stage)
    : BucketEngine(std::move(options), std::move(hashes), c10::kCPU,
                   /*exchanges=*/lanes.commit != nullptr),
      local_stage_(std::move(local_stage)),
      residuals_(c10::kCPU),
      sending_codecs_(options_, layout_, residuals_),
      finishing_codecs_(options_, layout_, residuals_) {
  if (begins_with_residuals()) make_residuals();
  GRADFERRY_EXPECTS(exchanges_ == (options_.world_size > 1), kConfig,
                    "an engine for " + std::to_string(options_.world_size) +
                        " ranks needs lanes, and one for a single rank has none");
  if (!exchanges_) return;
  exchange_.emplace(options_.agreement(), layout_.nodes(), *options_.peers, std::move(lanes));
  make_workspace(memory.get());
}

void HostEngine::make_workspace(SharedMemory* memory) {
  const Workspace workspace = plan_host_workspace(options_, layout_, memory != nullptr);
  expect_offsets_fit(workspace.message_bytes, options_.world_size);
  const uint64_t shared_bytes = workspace.slots * workspace.shared_bytes;
  GRADFERRY_EXPECTS(memory == nullptr || memory->num_bytes() == shared_bytes, kState,
                    "shared memory has " + std::to_string(memory->num_bytes()) +
                        " bytes, expected " + std::to_string(shared_bytes));
  for (size_t i = 0; i < workspace.slots; ++i) slots_.push_back(make_slot(workspace, memory, i));
  for (Slot& slot : slots_) free_slots_.push_back(&slot);
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  const auto length = static_cast<int64_t>(commit_record_bytes(options_));
  for (size_t i = 0; i < kCommitSlots; ++i) {
    commit_slots_.push_back(at::zeros({length * options_.world_size}, bytes));
  }
  EngineStats& stats = life_.stats;
  stats.workspace = workspace;
  stats.workspace_bytes += workspace.bytes() + all_commits_bytes(options_);
  stats.workspace_allocations = workspace.slots + kCommitSlots;
}

std::shared_ptr<HostEngine> HostEngine::start(EngineOptions options, ParameterHashes hashes,
                                              ExchangeLanes lanes,
                                              const std::shared_ptr<SharedMemory>& memory,
                                              std::string local_stage) {
  std::shared_ptr<HostEngine> engine(new HostEngine(
      std::move(options), std::move(hashes), std::move(lanes), memory, std::move(local_stage)));
  if (engine->exchange_) {
    BackgroundThread::start(
        "gf-finish", BackgroundThread::Role::kEngine,
        [engine] { engine->exchange_->close(engine->work()); },
        [weak = std::weak_ptr(engine)] {
          if (const auto alive = weak.lock()) alive->request_stop();
        });
  }
  // The handle's last copy stops the engine; the finishing thread keeps the object until it ends.
  return {engine.get(), [engine](HostEngine*) { engine->request_stop(); }};
}

// --- DDP's thread ---

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
                                                         .used = std::move(used),
                                                         .unused = std::move(unused),
                                                         .event = bucket.event});
  const at::Tensor kept = options_.keep_gathered ? kept_messages(*job->plan) : at::Tensor();
  const auto& chunks = job->plan->chunks;
  int64_t begin = 0;
  for (const ChunkPlan& chunk : chunks) {
    const int64_t size = total_bytes(chunk.rails.front().gathered);
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
  if (changes_residuals(bucket.step)) convert_residuals(pass_scale_);
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

// Posts what the others wait for first, so that it is sent while the next chunk is prepared. DDP's
// thread waits for the network only if all slots are in use.
void HostEngine::send_chunk(const std::shared_ptr<BucketJob>& bucket, const ChunkPlan& plan,
                            bool last, at::Tensor kept) {
  auto job = std::make_unique<ChunkJob>();
  job->bucket = bucket;
  job->last = last;
  job->chunk.plan = &plan;
  job->chunk.slot = take_slot();
  job->chunk.gathered = kept.defined() ? std::move(kept) : job->chunk.slot->gathered;
  job->chunk.step = bucket->step;
  job->chunk.number = life_.stats.chunks;  // only this thread writes it
  if (!scatters(options_.collective)) {
    send_to_all(*job);
  } else if (layout_.nodes().is_flat()) {
    send_to_peers(*job, sending_codecs_, WireStatus::kOk);
  } else {
    send_to_siblings(*job);
  }
  const std::lock_guard lock(life_.mutex);
  ++life_.stats.chunks;
  bucket->event.encoded_ns = EventLog::now();
  if (life_.death) throw Error(*life_.death);
  queue_.push_back(std::move(job));
  life_.changed.notify_all();
}

Slot* HostEngine::take_slot() {
  std::unique_lock lock(life_.mutex);
  life_.changed.wait(lock, [&] { return !free_slots_.empty() || life_.death; });
  if (life_.death) throw Error(*life_.death);
  // Slots become free in the order of their chunks, and so chunk n is in slot n % slots
  // (exchange.h). Where siblings share none, the slot used last is the one that the cache may still
  // hold.
  const auto taken = slots_[0].dense_shared.defined() ? free_slots_.begin() : free_slots_.end() - 1;
  Slot* slot = *taken;
  free_slots_.erase(taken);
  return slot;
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

void HostEngine::send_to_all(ChunkJob& job) {
  WireStatus status = WireStatus::kOk;
  std::vector<uint64_t> checksums(1, 0);
  int64_t encode_ns = 0;
  try {
    const TimedRange timed("gradferry::encode", encode_ns);
    sending_codecs_.encode(work_of(job), exchange_->gather_message(job.chunk), checksums);
  } catch (const std::exception& error) {
    job.encode_error = error.what();
    status = WireStatus::kLocalFailure;
  }
  exchange_->post_gather(job.chunk, status, checksums.front());
  const std::lock_guard lock(life_.mutex);
  job.bucket->event.encode_ns += encode_ns;
}

// --- DDP's thread: a world of one, unused parameters, what is kept ---

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
    sending_codecs_.deliver_alone({&chunk, bucket.step, gradient, gradient});
  }
  unused.put_back(bucket.used);
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

// Where the messages of a bucket are kept, chunk by chunk. Allocated when it comes for the first
// time.
at::Tensor HostEngine::kept_messages(const BucketPlan& plan) {
  at::Tensor& kept = kept_[&plan];
  if (kept.defined()) return kept;
  int64_t num_bytes = 0;
  for (const ChunkPlan& chunk : plan.chunks) num_bytes += total_bytes(chunk.rails.front().gathered);
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
    sending_codecs_.decode({&chunk, 0, into, into}, messages, nullptr);
    messages += total_bytes(chunk.rails.front().gathered);
  }
  return true;
}

// --- either thread ---

// The peers get messages of the right size whatever happens here; the commit tells them why.
void HostEngine::send_to_peers(ChunkJob& job, ChunkCodecs& codecs, WireStatus status) {
  BucketJob& bucket = *job.bucket;
  std::vector<uint64_t> checksums(job.chunk.plan->scattered.size(), 0);
  int64_t encode_ns = 0;
  ResidualSquares squares;
  if (status == WireStatus::kOk) {
    try {
      const TimedRange timed("gradferry::encode", encode_ns);
      const ChunkCodecs::Work work = work_of(job);
      codecs.encode(work, bytes(job.chunk.slot->scatter_send), checksums);
      squares = codecs.sample_worker(work);
    } catch (const std::exception& error) {
      job.encode_error = error.what();
      status = WireStatus::kLocalFailure;
    }
  }
  exchange_->post_scatter(job.chunk, status, checksums);
  const std::lock_guard lock(life_.mutex);
  bucket.event.encode_ns += encode_ns;
  bucket.event.worker += squares;
}

ChunkCodecs::Work HostEngine::work_of(const ChunkJob& job) const {
  const BucketJob& bucket = *job.bucket;
  void* gradient = bucket.gradient.mutable_data_ptr();
  const void* summed = layout_.nodes().is_flat() ? gradient : job.chunk.slot->sum.const_data_ptr();
  return {job.chunk.plan, bucket.step, gradient, summed};
}

// --- the finishing thread ---

bool HostEngine::work() {
  std::optional<Error> error;
  try {
    while (do_oldest()) {
    }
  } catch (const Unfinished& unfinished) {
    // If this rank has told a fault in a commit in flight, that is what the others raise.
    const auto tells = [](const Commit& commit) { return bool{commit.bucket->fault}; };
    if (std::ranges::any_of(commits_, tells)) error = verdict_of_commits(10);
    if (!error) error = with_memory([&] { return unfinished.cause(); });
  } catch (...) {
    error = describe_failure(std::current_exception(), options_.world_rank());
  }
  // Perhaps another rank has read a fault in a commit that is here, too, and posted nothing since.
  if (error && error->kind() == ErrorKind::kPeer) error = verdict_of_commits(1).value_or(*error);
  if (error) fail_all(*error);
  std::unique_lock lock(life_.mutex);
  life_.changed.wait(lock, [&] { return !life_.running; });  // it may be posting on a lane
  return error.has_value();
}

// False when told to stop with nothing in flight.
bool HostEngine::do_oldest() {
  if (commits_.size() == commit_slots_.size()) finish_commit();
  if (!take_handed_in()) return false;
  if (const auto stage = next_stage()) {
    advance(*stage);
    if (!scatters(options_.collective)) deliver_early();
  } else if (!commits_.empty()) {
    finish_commit();
  }
  return true;
}

bool HostEngine::is_idle() const {
  return commits_.empty() && std::ranges::all_of(waiting_, &Chunks::empty);
}

// Waits only if there is nothing else to do.
bool HostEngine::take_handed_in() {
  std::unique_lock lock(life_.mutex);
  if (is_idle()) {
    life_.changed.wait(
        lock, [&] { return !queue_.empty() || life_.death || (life_.stop && !life_.running); });
    if (!life_.death && queue_.empty()) return false;
  }
  if (life_.death) throw Error(*life_.death);  // run() failed
  const PipelineStage begin = !scatters(options_.collective) ? kGather
                              : layout_.nodes().is_flat()    ? kScatter
                                                             : kLocalScatter;
  Chunks& first = waiting_[begin];
  // One by one, so that an exception leaves no job behind.
  for (; !queue_.empty(); queue_.pop_front()) first.push_back(std::move(queue_.front()));
  return true;
}

std::optional<size_t> HostEngine::next_stage() const {
  if (layout_.nodes().is_flat()) return next_stage_of_peers();
  std::optional<size_t> oldest;
  for (size_t stage = kStages; stage-- > 0;) {
    if (waiting_[stage].empty()) continue;
    if (waiting_[stage].front()->chunk.pending()->isCompleted()) return stage;
    if (!oldest) oldest = stage;
  }
  return oldest;
}

std::optional<size_t> HostEngine::next_stage_of_peers() const {
  // With two, one travels while the other is decoded. With as many as slots, those that have come
  // would wait undecoded for the next scatter, which needs their slots.
  const size_t most_gathers = std::max<size_t>(slots_.size() / 2, 2);
  const bool may_gather = waiting_[kGather].size() < most_gathers;
  if (may_gather && !waiting_[kScatter].empty()) return kScatter;
  if (!waiting_[kGather].empty()) return kGather;
  return std::nullopt;
}

// The job stays where it waits until it is done, so that an exception finds its bucket there.
void HostEngine::advance(size_t stage) {
  ChunkJob& job = *waiting_[stage].front();
  const ProfilerContext::Guard profiled(job.bucket->profiler);
  const Nodes& nodes = layout_.nodes();
  size_t next = stage + 1;
  if (stage == kLocalScatter) {
    sum(job);
    if (!nodes.is_leader(options_.rank)) next = kForward;
  } else if (stage == kScatter) {
    reduce(job);
    if (!gathers(options_.collective)) next = kStages;
  } else if (stage == kGather && !nodes.is_flat()) {
    forward(job);
  } else {
    decode(job);
    next = kStages;
  }
  if (next != kStages) {
    waiting_[next].push_back(std::move(waiting_[stage].front()));
  } else if (job.last) {
    post_commit(job.bucket);
  }
  waiting_[stage].pop_front();
}

Fault HostEngine::local_fault(const ChunkJob& job, Phase phase) const {
  return {WireStatus::kLocalFailure, phase, options_.rank, job.chunk.number, 0, 0};
}

void HostEngine::note_encode_error(ChunkJob& job, Phase phase) const {
  if (job.encode_error.empty()) return;
  note(job.bucket->fault, local_fault(job, phase));
  job.bucket->local_error = job.encode_error;
}

// Adds up the node's gradients. A rank beyond the rails only hears how its siblings are.
void HostEngine::sum(ChunkJob& job) {
  BucketJob& bucket = *job.bucket;
  {
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    note(bucket.fault, exchange_->wait_local_scatter(job.chunk));
  }
  const Nodes& nodes = layout_.nodes();
  if (!nodes.is_leader(options_.rank)) {
    exchange_->post_forward(job.chunk, bucket.fault.status);
    return;
  }
  const uint32_t own = nodes.local_index(options_.rank);
  int64_t encode_ns = 0;
  if (!bucket.fault) {
    const TimedRange timed("gradferry::encode", encode_ns);
    std::vector<const std::byte*> gradients(nodes.siblings(options_.rank).size(), nullptr);
    for (uint32_t i = 0; i < gradients.size(); ++i) {
      if (i != own) gradients[i] = exchange_->scattered_gradients(job.chunk, i);
    }
    // The mean of nodes' sums times this is the mean of ranks.
    const double scale = static_cast<double>(nodes.num_nodes()) / nodes.world_size();
    sum_rail(*job.chunk.plan, own, gradients, bucket.gradient.const_data_ptr(), scale,
             job.chunk.slot->sum.mutable_data_ptr());
  }
  {
    const std::lock_guard lock(life_.mutex);  // run() may be at the bucket's next chunk
    bucket.event.encode_ns += encode_ns;
  }
  send_to_peers(job, finishing_codecs_, bucket.fault.status);
}

// The owner's message is sent even after an error here, with its status: the others wait for it. In
// a reduce-scatter there is none, and only the commit tells them.
void HostEngine::reduce(ChunkJob& job) {
  BucketJob& bucket = *job.bucket;
  const Fault local = local_fault(job, Phase::kScatter);
  note_encode_error(job, Phase::kScatter);
  {
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    note(bucket.fault, exchange_->wait_scatter(job.chunk));
  }
  uint64_t checksum = 0;
  if (!bucket.fault) {
    try {
      const TimedRange timed("gradferry::reduce", bucket.event.reduce_ns);
      checksum = reduce_payloads(job);
    } catch (const std::exception& error) {
      note(bucket.fault, local);
      bucket.local_error = error.what();
    }
  }
  if (gathers(options_.collective)) {
    exchange_->post_gather(job.chunk, bucket.fault.status, checksum);
  } else {
    free_slot(job);
  }
}

void HostEngine::forward(ChunkJob& job) {
  {
    const TimedRange timed("gradferry::network", job.bucket->event.network_ns);
    note(job.bucket->fault, exchange_->wait_gather(job.chunk));
  }
  exchange_->post_forward(job.chunk, job.bucket->fault.status);
}

// Returns the checksum of the payload for all ranks.
uint64_t HostEngine::reduce_payloads(const ChunkJob& job) {
  std::vector<const std::byte*> payloads;
  const Nodes& nodes = layout_.nodes();
  for (uint32_t node = 0; node < nodes.num_nodes(); ++node) {
    payloads.push_back(exchange_->scattered_payload(job.chunk, node));
  }
  const ChunkCodecs::Work work = work_of(job);
  const ChunkCodecs::Reduced reduced =
      gathers(options_.collective)
          ? finishing_codecs_.reduce(work, payloads,
                                     exchange_->gather_message(job.chunk) + kHeaderBytes)
          : finishing_codecs_.accumulate(work, payloads);
  if (reduced.corrupt_tiles != 0) {
    const auto node = finishing_codecs_.sender_of_corrupt(work, payloads);
    const uint32_t sender =
        node ? nodes.peers(nodes.local_index(options_.rank))[*node] : options_.rank;
    note(job.bucket->fault, {WireStatus::kCorruptPayload, Phase::kScatter, sender, job.chunk.number,
                             0, reduced.corrupt_tiles});
  }
  if (options_.raise_nonfinite && !reduced.nonfinite_tiles.empty()) {
    note(job.bucket->fault, {WireStatus::kNonFiniteMean, Phase::kScatter, options_.rank,
                             job.chunk.number, 0, reduced.nonfinite_tiles.front()});
  }
  return reduced.checksum;
}

void HostEngine::decode(ChunkJob& job) {
  BucketJob& bucket = *job.bucket;
  if (!scatters(options_.collective)) note_encode_error(job, Phase::kGather);
  {
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    note(bucket.fault, layout_.nodes().is_flat() ? exchange_->wait_gather(job.chunk)
                                                 : exchange_->wait_forward(job.chunk));
  }
  if (!bucket.fault) {
    try {
      const TimedRange timed("gradferry::decode", bucket.event.decode_ns);
      decode_messages(job);
      bucket.event.owner += finishing_codecs_.sample_owner(work_of(job));
    } catch (const std::exception& error) {
      note(bucket.fault, local_fault(job, Phase::kGather));
      bucket.local_error = error.what();
    }
  }
  free_slot(job);
}

void HostEngine::free_slot(const ChunkJob& job) {
  const std::lock_guard lock(life_.mutex);
  free_slots_.push_back(job.chunk.slot);
  life_.changed.notify_all();
}

void HostEngine::decode_messages(const ChunkJob& job) {
  const Slot& slot = *job.chunk.slot;
  const ChunkCodecs::DecodedTiles decoded =
      finishing_codecs_.decode(work_of(job), bytes(job.chunk.gathered),
                               static_cast<const std::byte*>(slot.scatter_send.const_data_ptr()));
  auto& nonfinite = job.bucket->nonfinite_tiles;
  for (const uint64_t tile : decoded.nonfinite_tiles) {
    if (nonfinite.empty() || options_.find_unused_parameters) {
      nonfinite.push_back(tile);
    } else {
      nonfinite.front() = std::min(nonfinite.front(), tile);
    }
  }
  for (const uint32_t source : decoded.corrupt_sources) {
    note(job.bucket->fault,
         {WireStatus::kCorruptPayload, Phase::kGather, source, job.chunk.number, 0, 1});
  }
}

// A bucket is complete only when the commits of all ranks report no fault: until then a single rank
// may have seen one.
void HostEngine::post_commit(std::shared_ptr<BucketJob> bucket) {
  const at::Tensor& slot = commit_slots_[bucket->event.bucket % commit_slots_.size()];
  const auto size = static_cast<int64_t>(commit_bytes(bucket->used.size()));
  Commit& commit = commits_.emplace_back(
      Commit{std::move(bucket), slot.narrow(0, 0, size * options_.world_size), {}});
  const BucketJob& job = *commit.bucket;
  commit.work = exchange_->post_commit(commit.records, job.step, job.event.bucket, job.fault,
                                       job.used, job.loss_scale);
}

void HostEngine::finish_commit() {
  Commit& commit = commits_.front();
  BucketJob& bucket = *commit.bucket;
  {
    const ProfilerContext::Guard profiled(bucket.profiler);
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    exchange_->wait(commit.work, Phase::kCommit, bucket.step, bucket.event.bucket);
  }
  const Verdict verdict = read_commit(exchange_->agreement(), bytes(commit.records), bucket.step,
                                      bucket.event.bucket, bucket.used.size());
  const Fault& fault = verdict.fault;
  if (fault.status == WireStatus::kNonFiniteMean) {
    throw nonfinite_mean(layout_, fault.received, bucket.step, "is");
  }
  if (fault) {
    std::string message = describe(options_.peers->in_world(verdict));
    const bool failed_here =
        fault.status == WireStatus::kLocalFailure && verdict.reporter == options_.rank;
    if (failed_here) message += ": " + bucket.local_error;
    throw Error(kind_of(fault), message);
  }
  if (!bucket.used.empty()) put_back_unused(commit);
  if (options_.raise_nonfinite && !bucket.nonfinite_tiles.empty()) {
    const uint64_t tile = std::ranges::min(bucket.nonfinite_tiles);  // the same on all ranks
    throw nonfinite_mean(layout_, tile, bucket.step, "is");
  }
  complete(bucket);
  commits_.pop_front();
}

// Restores parameters that no rank used; their non-finite values do not count as an error.
void HostEngine::put_back_unused(const Commit& commit) const {
  BucketJob& bucket = *commit.bucket;
  const UsedMap used =
      read_used(bytes(commit.records), options_.world_size, bucket.plan->parameters.size());
  bucket.unused.put_back(used);
  bucket.unused = {};
  std::erase_if(bucket.nonfinite_tiles, [&](uint64_t tile) {
    for (size_t i = 0; i < used.size(); ++i) {
      const Parameter& parameter = layout_.parameters()[bucket.plan->parameters[i]];
      if (tile - parameter.first_tile < parameter.num_tiles) return used[i] == 0;
    }
    return false;
  });
}

// Counts before it completes the Future: a thread that waits for it may ask for the state at once.
void HostEngine::complete(BucketJob& bucket) {
  if (bucket.future) bucket.event.complete_ns = EventLog::now();
  log_.add(bucket.event);
  {
    const std::lock_guard lock(life_.mutex);
    --life_.stats.in_flight;
    life_.changed.notify_all();
  }
  if (bucket.future) deliver(bucket);
}

// Completes the bucket of an all-gather as soon as its commit was posted. Not within advance(),
// where the thread still holds the profiler's state.
void HostEngine::deliver_early() {
  if (commits_.empty()) return;
  BucketJob& bucket = *commits_.back().bucket;
  if (!bucket.future || bucket.fault) return;
  bucket.event.complete_ns = EventLog::now();
  deliver(bucket);
}

void HostEngine::deliver(BucketJob& bucket) {
  bucket.gradient.reset();
  bucket.profiler.clear();
  bucket.future->markCompleted(std::move(bucket.value));
  bucket.future.reset();
}

// --- failure: with which error, and what becomes of the buckets in flight ---

// The fault in a commit in flight that has come, or comes within so many times 100 ms.
std::optional<Error> HostEngine::verdict_of_commits(int tries) {
  try {
    for (; tries > 0 && !commits_.empty(); --tries) {
      while (!commits_.empty() && exchange_->has_come(commits_.front().work)) finish_commit();
    }
  } catch (...) {
    return describe_failure(std::current_exception(), options_.world_rank());
  }
  return std::nullopt;
}

// Takes the buckets of everything in flight, in order of their numbers; none, where it throws
// std::bad_alloc. With life_.mutex held.
std::vector<std::shared_ptr<BucketJob>> HostEngine::take_all_buckets() {
  std::vector<std::shared_ptr<BucketJob>> buckets;
  for (const Chunks& chunks : waiting_) {
    for (const auto& job : chunks) buckets.push_back(job->bucket);
  }
  for (const auto& commit : commits_) buckets.push_back(commit.bucket);
  for (const auto& job : queue_) buckets.push_back(job->bucket);
  queue_.clear();
  const auto number = [](const auto& bucket) { return bucket->event.bucket; };
  std::ranges::sort(buckets, {}, number);
  const auto repeated = std::ranges::unique(buckets, {}, number);
  buckets.erase(repeated.begin(), repeated.end());
  return buckets;
}

void HostEngine::fail_all(const Error& error) {
  std::vector<std::shared_ptr<BucketJob>> failed;
  {
    const std::lock_guard lock(life_.mutex);
    failed = with_memory([&] { return take_all_buckets(); });
    for (const auto& bucket : failed) with_memory([&] { log_.add(bucket->event); });
    if (!life_.death) life_.death = finished(error, log_, options_);
    life_.stats.in_flight = 0;
    life_.changed.notify_all();
  }
  for (Chunks& chunks : waiting_) chunks.clear();
  commits_.clear();
  options_.peers->tell(life_.death->what(), life_.death->kind());
  const std::exception_ptr exception = options_.exception_of(*life_.death);
  for (const auto& bucket : failed) {
    bucket->profiler.clear();
    if (bucket->future) bucket->future->setErrorIfNeeded(exception);
    bucket->future.reset();
  }
}

// --- between steps ---

bool HostEngine::changes_residuals(uint64_t step) const {
  return has_residuals_ && options_.touches_residuals(step);
}

float HostEngine::loss_scale() const {
  if (!options_.loss_scale.defined()) return 1.0F;
  const auto scale = *options_.loss_scale.const_data_ptr<float>();
  GRADFERRY_EXPECTS(is_loss_scale(std::bit_cast<uint32_t>(scale)), kState,
                    "the GradScaler's scale is " + std::to_string(scale) + kUnsoundLossScale);
  return scale;
}

// Converts the residuals to the units of a pass with this loss scale, those of buckets that will
// not come, too.
void HostEngine::convert_residuals(float scale) {
  const float gain = residual_scale_ == 0.0F ? 1.0F : scale / residual_scale_;
  GRADFERRY_EXPECTS(std::isfinite(gain), kState,
                    c10::str("residuals are in units of a loss scale of ", residual_scale_,
                             ", which cannot become ", scale,
                             "; load a state that was saved with a loss scale near this one"));
  residual_scale_ = scale;
  if (gain != 1.0F) residuals_.scale(gain);
}

SavedResiduals HostEngine::save_residuals(const SavedResiduals& kept) {
  return {copy_residual(residuals_.worker_tensor(), kept.worker),
          copy_residual(residuals_.owner_tensor(), kept.owner), residual_scale_};
}

void HostEngine::make_residuals() {
  if (has_residuals_) return;
  residuals_ = Residuals(layout_, c10::kCPU);
  has_residuals_ = true;
  life_.stats.residual_bytes = residuals_.num_bytes();
}

void HostEngine::load_residuals(const SavedResiduals& saved) {
  if (!has_residuals_) return;
  residuals_.load(saved.worker, saved.owner);
  residual_scale_ = saved.loss_scale;
}

void HostEngine::change_worker_residual(uint64_t offset, const at::Tensor& values, float factor) {
  const float next_scale = loss_scale();
  if (residual_scale_ == 0.0F) residual_scale_ = next_scale;
  residuals_.add_to_worker(offset, values.to(at::kFloat) * (factor * residual_scale_));
}

// --- UnusedCopy ---

UnusedCopy::UnusedCopy(const Layout& layout, const std::vector<uint32_t>& parameters,
                       const UsedMap& used, const at::Tensor& gradient, const at::Tensor& worker,
                       const at::Tensor& owner) {
  uint64_t offset = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = layout.parameters()[parameters[i]];
    const uint64_t n = parameter.num_elements;
    const uint64_t begin = std::exchange(offset, offset + n);
    if (used[i] != 0 || n == 0) continue;
    const auto keep = [&](const at::Tensor& whole, ResidualRange range) {
      if (!whole.defined() || range.begin == range.end) return;
      const at::Tensor now = whole.narrow(0, static_cast<int64_t>(range.begin),
                                          static_cast<int64_t>(range.end - range.begin));
      parts_.push_back({i, now, now.clone()});
    };
    keep(gradient, {begin, begin + n});
    keep(worker, layout.worker_residual_range(parameter));
    keep(owner, layout.owner_residual_range(parameter));
  }
}

void UnusedCopy::put_back(const UsedMap& used) const {
  for (const CopiedPart& part : parts_) {
    if (used[part.position] == 0) part.now.copy_(part.before);
  }
}

}  // namespace gradferry
