// The engine's second half: what the finishing thread does.
#include <algorithm>

#include "engine.h"

namespace gradferry {
namespace {

// Keeps the first fault, except that an echo of another rank's trouble gives way to a cause.
void note(Fault& kept, const Fault& fault) {
  if (fault && (!kept || kept.status == WireStatus::kPeerTrouble)) kept = fault;
}

}  // namespace

void Engine::finish() {
  {
    const std::lock_guard lock(mutex_);
    clean_.emplace();  // captured here: this thread never ran Python
    changed_.notify_all();
  }
  std::optional<Error> error;
  try {
    while (finish_one()) {
    }
  } catch (...) {
    error = describe_failure(std::current_exception(), options_.rank);
  }
  end(error);
}

// Does the oldest thing that can be done; false when told to stop with nothing in flight.
bool Engine::finish_one() {
  if (commits_.size() == commit_slots_.size()) finish_commit();
  std::unique_ptr<ChunkJob> next;
  {
    std::unique_lock lock(mutex_);
    if (gathers_.empty() && commits_.empty()) {
      changed_.wait(lock, [&] { return !queue_.empty() || death_ || (stop_ && !running_); });
      if (!death_ && queue_.empty()) return false;
    }
    if (death_) throw Error(*death_);  // run() failed
    if (!queue_.empty() && gathers_.size() < kGathersInFlight) {
      next = std::move(queue_.front());
      queue_.pop_front();
    }
  }
  if (next) {
    reduce_chunk(std::move(next));
  } else if (!gathers_.empty()) {
    auto job = std::move(gathers_.front());
    gathers_.pop_front();
    decode_chunk(std::move(job));
  } else {
    finish_commit();
  }
  return true;
}

Fault Engine::local_fault(const ChunkJob& job, Phase phase) const {
  return {WireStatus::kLocalFailure, phase, options_.rank, job.chunk.number, 0, 0};
}

void Engine::reduce_chunk(std::unique_ptr<ChunkJob> job) {
  // In gathers_ first, so that an exception finds its bucket there.
  ChunkJob& current = *gathers_.emplace_back(std::move(job));
  BucketJob& bucket = *current.bucket;
  const ProfilerContext::Guard profiled(bucket.profiler);
  const Fault local = local_fault(current, Phase::kScatter);
  if (!current.encode_error.empty()) {
    note(bucket.fault, local);
    bucket.local_error = current.encode_error;
  }
  {
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    note(bucket.fault, exchange_->wait_scatter(current.chunk));
  }
  uint64_t checksum = 0;
  if (!bucket.fault) {
    try {
      const TimedRange timed("gradferry::reduce", bucket.event.reduce_ns);
      checksum = reduce(current);
    } catch (const std::exception& error) {
      note(bucket.fault, local);
      bucket.local_error = error.what();
    }
  }
  exchange_->post_gather(current.chunk, bucket.fault.status, checksum);
}

uint64_t Engine::reduce(const ChunkJob& job) {
  for (uint32_t rank = 0; rank < options_.world_size; ++rank) {
    payloads_[rank] = exchange_->scattered_payload(job.chunk, rank);
  }
  std::byte* out = static_cast<std::byte*>(job.chunk.slot->gather_send.mutable_data_ptr()) +
                   sizeof(MessageHeader);
  uint64_t checksum = 0;
  uint64_t corrupt = 0;
  for (const PlannedBatch& planned : job.chunk.plan->reduce) {
    const TileBatch batch = make_batch(planned, job, Stage::kOwner, finish_status_);
    layout_.codecs()[planned.codec_index].codec->reduce(
        batch, payloads_.data(), options_.world_size, &job.bucket->gain,
        planned.owner_residual ? residuals_.owner() : nullptr, out);
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      const TileStatus& status = finish_status_[i];
      checksum += status.checksum;
      corrupt += (status.flags & kTileCorrupt) != 0;
    }
  }
  if (corrupt != 0) {
    note(job.bucket->fault, {WireStatus::kCorruptPayload, Phase::kScatter, sender_of_corrupt(job),
                             job.chunk.number, 0, corrupt});
  }
  return checksum;
}

// The codec reduces all payloads of a tile together; each by itself tells whose is corrupt.
uint32_t Engine::sender_of_corrupt(const ChunkJob& job) {
  for (uint32_t rank = 0; rank < options_.world_size; ++rank) {
    for (const PlannedBatch& planned : job.chunk.plan->reduce) {
      const TileBatch batch = make_batch(planned, job, Stage::kWorker, finish_status_);
      layout_.codecs()[planned.codec_index].codec->decode(batch, payloads_[rank], nullptr, 0.0F,
                                                          nullptr);
      for (size_t i = 0; i < planned.tiles.size(); ++i) {
        if ((finish_status_[i].flags & kTileCorrupt) != 0) return rank;
      }
    }
  }
  return options_.rank;
}

void Engine::decode_chunk(std::unique_ptr<ChunkJob> job) {
  BucketJob& bucket = *job->bucket;
  const ProfilerContext::Guard profiled(bucket.profiler);
  try {
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    note(bucket.fault, exchange_->wait_gather(job->chunk));
  } catch (...) {
    gathers_.push_front(std::move(job));  // end() fails its bucket
    throw;
  }
  if (!bucket.fault) {
    try {
      const TimedRange timed("gradferry::decode", bucket.event.decode_ns);
      decode(*job);
      bucket.event.owner +=
          sample_.owner(*job->chunk.plan, bucket.gradient.const_data_ptr(), residuals_.owner());
    } catch (const std::exception& error) {
      note(bucket.fault, local_fault(*job, Phase::kGather));
      bucket.local_error = error.what();
    }
  }
  {
    const std::lock_guard lock(mutex_);
    free_slots_.push_back(job->chunk.slot);
    changed_.notify_all();
  }
  if (job->last) post_commit(job->bucket);
}

void Engine::decode(const ChunkJob& job) {
  const auto* in = static_cast<const std::byte*>(job.chunk.slot->gather_receive.const_data_ptr());
  const auto& batches = job.chunk.plan->decode;
  for (size_t b = 0; b < batches.size(); ++b) {
    const PlannedBatch& planned = batches[b];
    if (planned.worker_residual) {
      decode_with_residual(job, b);
    } else {
      layout_.codecs()[planned.codec_index].codec->decode(
          make_batch(planned, job, Stage::kOwner, finish_status_), in,
          job.bucket->gradient.mutable_data_ptr(), 0.0F, nullptr);
    }
    for (size_t i = 0; i < planned.tiles.size(); ++i) {
      const uint32_t flags = finish_status_[i].flags;
      auto& nonfinite = job.bucket->nonfinite_tiles;
      if ((flags & kTileNonFinite) != 0 && (nonfinite.empty() || options_.find_unused_parameters)) {
        nonfinite.push_back(planned.tiles[i].id);
      }
      if ((flags & kTileCorrupt) != 0) {
        note(job.bucket->fault, {WireStatus::kCorruptPayload, Phase::kGather, planned.ranks[i],
                                 job.chunk.number, 0, 1});
      }
    }
  }
}

// Looks before it decodes: where another rank's gradient was not finite, what this rank sent was in
// vain, and its own gradient is still there to tell what that was.
void Engine::decode_with_residual(const ChunkJob& job, size_t batch_index) {
  const auto* in = static_cast<const std::byte*>(job.chunk.slot->gather_receive.const_data_ptr());
  const auto* out = static_cast<const std::byte*>(job.chunk.slot->scatter_send.const_data_ptr());
  const PlannedBatch& planned = job.chunk.plan->decode[batch_index];
  const PlannedBatch& sent = job.chunk.plan->encode[batch_index];
  const ResolvedCodec& resolved = layout_.codecs()[planned.codec_index];
  const Codec& codec = *resolved.codec;
  void* gradient = job.bucket->gradient.mutable_data_ptr();
  const TileBatch batch = make_batch(planned, job, Stage::kOwner, finish_status_);
  codec.decode(batch, in, nullptr, 0.0F, nullptr);
  codec.undo(make_batch(sent, job, Stage::kWorker, finish_status_), out, in, gradient,
             options_.alpha(resolved, job.bucket->step), residuals_.worker());
  codec.decode(batch, in, gradient, options_.beta(resolved), residuals_.worker());
}

void Engine::post_commit(std::shared_ptr<BucketJob> bucket) {
  const auto& [send, receive] = commit_slots_[bucket->number % commit_slots_.size()];
  const auto size = static_cast<int64_t>(commit_bytes(bucket->used.size()));
  Commit& commit = commits_.emplace_back(
      Commit{std::move(bucket), receive.narrow(0, 0, size * options_.world_size), {}});
  const BucketJob& job = *commit.bucket;
  commit.work = exchange_->post_commit(send.narrow(0, 0, size), commit.receive, job.step,
                                       job.number, job.fault, job.used);
}

void Engine::finish_commit() {
  Commit& commit = commits_.front();
  BucketJob& bucket = *commit.bucket;
  {
    const ProfilerContext::Guard profiled(bucket.profiler);
    const TimedRange timed("gradferry::network", bucket.event.network_ns);
    exchange_->wait(commit.work, Phase::kCommit, bucket.step, bucket.number);
  }
  uint32_t reporter = 0;
  const Fault fault = read_commit(exchange_->agreement(), commit.receive, bucket.step,
                                  bucket.number, &reporter, bucket.used.size());
  if (fault) {
    std::string message = describe(fault, reporter, bucket.step);
    if (fault.status != WireStatus::kLocalFailure) {
      throw Error(ErrorKind::kProtocol, message);
    }
    if (reporter == options_.rank) message += ": " + bucket.local_error;
    throw Error(ErrorKind::kPeer, message);
  }
  if (!bucket.used.empty()) put_back_unused(commit);
  if (options_.raise_nonfinite && !bucket.nonfinite_tiles.empty()) {
    throw Error(ErrorKind::kState,
                "the averaged gradient of '" + parameter_of(bucket.nonfinite_tiles.front()) +
                    "' is not finite at step " + std::to_string(bucket.step) +
                    "; lower the learning rate or the loss scale, or attach with "
                    "nonfinite='propagate' to see it in .grad");
  }
  complete(bucket);
  commits_.pop_front();
}

// What no rank used stays as it is, and is nobody's infinity.
void Engine::put_back_unused(const Commit& commit) {
  BucketJob& bucket = *commit.bucket;
  const UsedMap used =
      read_used(commit.receive, options_.world_size, bucket.plan->parameters.size());
  bucket.unused.put_back(used, bucket.gain);
  bucket.unused = {};
  std::erase_if(bucket.nonfinite_tiles, [&](uint64_t tile) {
    for (size_t i = 0; i < used.size(); ++i) {
      const Parameter& parameter = layout_.parameters()[bucket.plan->parameters[i]];
      if (tile - parameter.first_tile < parameter.num_tiles) return used[i] == 0;
    }
    return false;
  });
}

void Engine::complete(BucketJob& bucket) {
  bucket.event.complete_ns = EventLog::now();
  log_.add(bucket.event);
  {
    const std::lock_guard lock(mutex_);
    --stats_.in_flight;
    if (!bucket.nonfinite_tiles.empty() && !options_.in_warmup(bucket.step)) step_nonfinite_ = true;
  }
  bucket.gradient.reset();
  bucket.profiler.clear();
  bucket.future->markCompleted(std::move(bucket.value));
  bucket.future.reset();
}

std::string Engine::parameter_of(uint64_t tile) const {
  const auto& parameters = layout_.parameters();
  const auto after = std::upper_bound(
      parameters.begin(), parameters.end(), tile,
      [](uint64_t id, const Parameter& parameter) { return id < parameter.first_tile; });
  return std::prev(after)->name;
}

// One job per chunk, but one entry per bucket.
void Engine::log_failed(std::vector<std::shared_ptr<BucketJob>> jobs) {
  const auto number = [](const auto& job) { return job->number; };
  std::ranges::sort(jobs, {}, number);
  const auto repeated = std::ranges::unique(jobs, {}, number);
  jobs.erase(repeated.begin(), repeated.end());
  for (const auto& job : jobs) log_.add(job->event);
}

// The thread's last act. With an error: the other ranks are told, and every bucket in flight fails
// with it.
void Engine::end(const std::optional<Error>& error) {
  std::vector<std::shared_ptr<BucketJob>> failed;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& job : gathers_) failed.push_back(job->bucket);
    for (const auto& commit : commits_) failed.push_back(commit.bucket);
    for (const auto& job : queue_) failed.push_back(job->bucket);
    queue_.clear();
    if (error) log_failed(failed);
    if (error && !death_) death_ = finished(*error, log_, options_.rank);
    stats_.in_flight = 0;
    changed_.notify_all();
  }
  gathers_.clear();
  commits_.clear();
  if (error) {
    options_.peers->tell(death_->what());
    const std::exception_ptr exception = options_.make_exception(*death_);
    for (const auto& bucket : failed) {
      bucket->profiler.clear();
      if (bucket->future) bucket->future->setErrorIfNeeded(exception);
      bucket->future.reset();
    }
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !running_; });  // run() may be posting on a lane
  for (Lane& lane : lanes_) {
    if (error) lane.close_later();
    lane.close();
  }
  ended_ = true;
  changed_.notify_all();
}

}  // namespace gradferry
