#include "host/bucket_pipeline.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "engine_errors.h"
#include "host/node_sum.h"
#include "tensor_bytes.h"

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
  return plan_workspace(layout, options.chunk_bytes,
                        {.cap_bytes = options.workspace_cap_bytes,
                         .other_bytes = all_commits_bytes(options),
                         .most_slots = most_slots,
                         .gathers_in_place = true,
                         .siblings_share = siblings_share,
                         .collective = options.collective,
                         .keeps_gathered = options.keep_gathered});
}

}  // namespace

uint64_t shared_memory_bytes(const EngineOptions& options) {
  const Layout layout(options.parameters, options.rank, options.nodes);
  const Workspace workspace = plan_host_workspace(options, layout, /*siblings_share=*/true);
  return workspace.slots * workspace.shared_bytes;
}

BucketPipeline::BucketPipeline(const EngineOptions& options, const Layout& layout,
                               HostResiduals& residuals, const ResidualSample& sample,
                               Exchange& exchange, SharedMemory* memory, EventLog& log,
                               EngineLife& life)
    : options_(options),
      layout_(layout),
      residuals_(residuals),
      sample_(sample),
      exchange_(exchange),
      log_(log),
      life_(life),
      codecs_(options, layout, residuals) {
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

// --- the thread that DDP calls from ---

Slot* BucketPipeline::take_slot() {
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

void BucketPipeline::hand_in(std::unique_ptr<ChunkJob> job) {
  const std::lock_guard lock(life_.mutex);
  if (life_.death) throw Error(*life_.death);
  queue_.push_back(std::move(job));
  life_.changed.notify_all();
}

// --- the finishing thread ---

bool BucketPipeline::work() {
  std::optional<Error> error;
  try {
    while (do_oldest()) {
    }
  } catch (...) {
    error = cause_of(describe_failure(std::current_exception(), options_.world_rank()));
  }
  if (error) fail_all(*error);
  std::unique_lock lock(life_.mutex);
  life_.changed.wait(lock, [&] { return !life_.running; });  // it may be posting on a lane
  return error.has_value();
}

// False when told to stop with nothing in flight.
bool BucketPipeline::do_oldest() {
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

bool BucketPipeline::is_idle() const {
  return commits_.empty() && std::ranges::all_of(waiting_, &Chunks::empty);
}

// Waits only if there is nothing else to do.
bool BucketPipeline::take_handed_in() {
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

std::optional<size_t> BucketPipeline::next_stage() const {
  if (layout_.nodes().is_flat()) return next_stage_of_peers();
  std::optional<size_t> oldest;
  for (size_t stage = kStages; stage-- > 0;) {
    if (waiting_[stage].empty()) continue;
    if (waiting_[stage].front()->chunk.pending()->isCompleted()) return stage;
    if (!oldest) oldest = stage;
  }
  return oldest;
}

std::optional<size_t> BucketPipeline::next_stage_of_peers() const {
  // With two, one travels while the other is decoded. With as many as slots, those that have come
  // would wait undecoded for the next scatter, which needs their slots.
  const size_t most_gathers = std::max<size_t>(slots_.size() / 2, 2);
  const bool may_gather = waiting_[kGather].size() < most_gathers;
  if (may_gather && !waiting_[kScatter].empty()) return kScatter;
  if (!waiting_[kGather].empty()) return kGather;
  return std::nullopt;
}

// The job stays where it waits until it is done, so that an exception finds its bucket there.
void BucketPipeline::advance(size_t stage) {
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

Fault BucketPipeline::local_fault(const ChunkJob& job, Phase phase) const {
  return {WireStatus::kLocalFailure, phase, options_.rank, job.chunk.number, 0, 0};
}

ChunkCodecs::Work BucketPipeline::work_of(const ChunkJob& job) const {
  const BucketJob& bucket = *job.bucket;
  void* gradient = bucket.gradient.mutable_data_ptr();
  const void* summed = layout_.nodes().is_flat() ? gradient : job.chunk.slot->sum.const_data_ptr();
  return {job.chunk.plan, bucket.step, gradient, summed};
}

// The peers get messages of the right size whatever happens here; the commit tells them why.
void BucketPipeline::send_to_peers(ChunkJob& job, ChunkCodecs& codecs, WireStatus status) {
  const ChunkPlan& plan = *job.chunk.plan;
  BucketJob& bucket = *job.bucket;
  std::vector<uint64_t> checksums(plan.shards.size(), 0);
  int64_t encode_ns = 0;
  ResidualSquares squares;
  if (status == WireStatus::kOk) {
    try {
      const TimedRange timed("gradferry::encode", encode_ns);
      const ChunkCodecs::Work work = work_of(job);
      codecs.encode(work, bytes(job.chunk.slot->scatter_send), checksums);
      squares = sample_.worker(plan, work.summed, residuals_.worker());
    } catch (const std::exception& error) {
      job.encode_error = error.what();
      status = WireStatus::kLocalFailure;
    }
  }
  exchange_.post_scatter(job.chunk, status, checksums);
  const std::lock_guard lock(life_.mutex);
  bucket.event.encode_ns += encode_ns;
  bucket.event.worker += squares;
}

void BucketPipeline::send_to_all(ChunkJob& job, ChunkCodecs& codecs) {
  WireStatus status = WireStatus::kOk;
  std::vector<uint64_t> checksums(1, 0);
  int64_t encode_ns = 0;
  try {
    const TimedRange timed("gradferry::encode", encode_ns);
    codecs.encode(work_of(job), exchange_.gather_message(job.chunk), checksums);
  } catch (const std::exception& error) {
    job.encode_error = error.what();
    status = WireStatus::kLocalFailure;
  }
  exchange_.post_gather(job.chunk, status, checksums.front());
  const std::lock_guard lock(life_.mutex);
  job.bucket->event.encode_ns += encode_ns;
}

void BucketPipeline::note_encode_error(ChunkJob& job, Phase phase) const {
  if (job.encode_error.empty()) return;
  note(job.bucket->fault, local_fault(job, phase));
  job.bucket->local_error = job.encode_error;
}

// Adds up the node's gradients. A rank beyond the rails only hears how its siblings are.
void BucketPipeline::sum(ChunkJob& job) {
  BucketJob& bucket = *job.bucket;
  {
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    note(bucket.fault, exchange_.wait_local_scatter(job.chunk));
  }
  const Nodes& nodes = layout_.nodes();
  if (!nodes.is_leader(options_.rank)) {
    exchange_.post_forward(job.chunk, bucket.fault.status);
    return;
  }
  const uint32_t own = nodes.local_index(options_.rank);
  int64_t encode_ns = 0;
  if (!bucket.fault) {
    const TimedRange timed("gradferry::encode", encode_ns);
    std::vector<const std::byte*> gradients(nodes.siblings(options_.rank).size(), nullptr);
    for (uint32_t i = 0; i < gradients.size(); ++i) {
      if (i != own) gradients[i] = exchange_.scattered_gradients(job.chunk, i);
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
  send_to_peers(job, codecs_, bucket.fault.status);
}

// The owner's message is sent even after an error here, with its status: the others wait for it. In
// a reduce-scatter there is none, and only the commit tells them.
void BucketPipeline::reduce(ChunkJob& job) {
  BucketJob& bucket = *job.bucket;
  const Fault local = local_fault(job, Phase::kScatter);
  note_encode_error(job, Phase::kScatter);
  {
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    note(bucket.fault, exchange_.wait_scatter(job.chunk));
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
    exchange_.post_gather(job.chunk, bucket.fault.status, checksum);
  } else {
    free_slot(job);
  }
}

void BucketPipeline::forward(ChunkJob& job) {
  {
    const TimedRange timed("gradferry::network", job.bucket->event.network_ns);
    note(job.bucket->fault, exchange_.wait_gather(job.chunk));
  }
  exchange_.post_forward(job.chunk, job.bucket->fault.status);
}

// Returns the checksum of the payload for all ranks.
uint64_t BucketPipeline::reduce_payloads(const ChunkJob& job) {
  std::vector<const std::byte*> payloads;
  const Nodes& nodes = layout_.nodes();
  for (uint32_t node = 0; node < nodes.num_nodes(); ++node) {
    payloads.push_back(exchange_.scattered_payload(job.chunk, node));
  }
  const ChunkCodecs::Work work = work_of(job);
  const ChunkCodecs::Reduced reduced =
      gathers(options_.collective)
          ? codecs_.reduce(work, payloads, exchange_.gather_message(job.chunk) + kHeaderBytes)
          : codecs_.accumulate(work, payloads);
  if (reduced.corrupt_tiles != 0) {
    const auto node = codecs_.sender_of_corrupt(work, payloads);
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

void BucketPipeline::decode(ChunkJob& job) {
  BucketJob& bucket = *job.bucket;
  if (!scatters(options_.collective)) note_encode_error(job, Phase::kGather);
  {
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    note(bucket.fault, layout_.nodes().is_flat() ? exchange_.wait_gather(job.chunk)
                                                 : exchange_.wait_forward(job.chunk));
  }
  if (!bucket.fault) {
    try {
      const TimedRange timed("gradferry::decode", bucket.event.decode_ns);
      decode_messages(job);
      bucket.event.owner +=
          sample_.owner(*job.chunk.plan, bucket.gradient.const_data_ptr(), residuals_.owner());
    } catch (const std::exception& error) {
      note(bucket.fault, local_fault(job, Phase::kGather));
      bucket.local_error = error.what();
    }
  }
  free_slot(job);
}

void BucketPipeline::free_slot(const ChunkJob& job) {
  const std::lock_guard lock(life_.mutex);
  free_slots_.push_back(job.chunk.slot);
  life_.changed.notify_all();
}

void BucketPipeline::decode_messages(const ChunkJob& job) {
  const Slot& slot = *job.chunk.slot;
  const ChunkCodecs::DecodedTiles decoded =
      codecs_.decode(work_of(job), bytes(job.chunk.gathered),
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
void BucketPipeline::post_commit(std::shared_ptr<BucketJob> bucket) {
  const at::Tensor& slot = commit_slots_[bucket->event.bucket % commit_slots_.size()];
  const auto size = static_cast<int64_t>(commit_bytes(bucket->used.size()));
  Commit& commit = commits_.emplace_back(
      Commit{std::move(bucket), slot.narrow(0, 0, size * options_.world_size), {}});
  const BucketJob& job = *commit.bucket;
  commit.work = exchange_.post_commit(commit.records, job.step, job.event.bucket, job.fault,
                                      job.used, job.loss_scale);
}

void BucketPipeline::finish_commit() {
  Commit& commit = commits_.front();
  BucketJob& bucket = *commit.bucket;
  {
    const ProfilerContext::Guard profiled(bucket.profiler);
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    exchange_.wait(commit.work, Phase::kCommit, bucket.step, bucket.event.bucket);
  }
  const Verdict verdict = read_commit(exchange_.agreement(), bytes(commit.records), bucket.step,
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
void BucketPipeline::put_back_unused(const Commit& commit) const {
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
void BucketPipeline::complete(BucketJob& bucket) {
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
void BucketPipeline::deliver_early() {
  if (commits_.empty()) return;
  BucketJob& bucket = *commits_.back().bucket;
  if (!bucket.future || bucket.fault) return;
  bucket.event.complete_ns = EventLog::now();
  deliver(bucket);
}

void BucketPipeline::deliver(BucketJob& bucket) {
  bucket.gradient.reset();
  bucket.profiler.clear();
  bucket.future->markCompleted(std::move(bucket.value));
  bucket.future.reset();
}

// --- failure: with which error, and what becomes of the buckets in flight ---

// A rank that has read the commit of a bucket, with an error, posts no later bucket. This rank may
// have waited for one, and only heard that the other rank failed; the same commit is here, too.
Error BucketPipeline::cause_of(Error error) {
  try {
    while (error.kind() == ErrorKind::kPeer && !commits_.empty() &&
           exchange_.has_come(commits_.front().work)) {
      finish_commit();
    }
  } catch (...) {
    return describe_failure(std::current_exception(), options_.world_rank());
  }
  return error;
}

// Takes the buckets of everything in flight, in order of their numbers. With life_.mutex held.
std::vector<std::shared_ptr<BucketJob>> BucketPipeline::take_all_buckets() {
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

void BucketPipeline::fail_all(const Error& error) {
  std::vector<std::shared_ptr<BucketJob>> failed;
  {
    const std::lock_guard lock(life_.mutex);
    failed = take_all_buckets();
    for (const auto& bucket : failed) log_.add(bucket->event);
    if (!life_.death) life_.death = finished(error, log_, options_);
    life_.stats.in_flight = 0;
    life_.changed.notify_all();
  }
  for (Chunks& chunks : waiting_) chunks.clear();
  commits_.clear();
  options_.peers->tell(life_.death->what(), life_.death->kind());
  const std::exception_ptr exception = options_.make_exception(*life_.death);
  for (const auto& bucket : failed) {
    bucket->profiler.clear();
    if (bucket->future) bucket->future->setErrorIfNeeded(exception);
    bucket->future.reset();
  }
}

}  // namespace gradferry
