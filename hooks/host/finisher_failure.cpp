// How the host's engine fails: with which error, and what becomes of the buckets in flight.
#include <algorithm>

#include "engine_errors.h"
#include "host/finisher.h"

namespace gradferry {

// A rank that has read the commit of a bucket, with an error, posts no later bucket. This rank may
// have waited for one, and only heard that the other rank failed; the same commit is here, too.
Error Finisher::cause_of(Error error) {
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
std::vector<std::shared_ptr<BucketJob>> Finisher::take_all_buckets() {
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

void Finisher::fail_all(const Error& error) {
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
