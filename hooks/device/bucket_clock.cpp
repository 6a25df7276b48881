#include "device/bucket_clock.h"

#include <utility>

#include "events.h"

namespace gradferry {

void BucketClock::start() {
  const std::lock_guard lock(mutex_);
  started_ = true;
}

TimedBucketPtr BucketClock::ready(uint64_t step, const c10::Stream& stream) {
  const std::lock_guard lock(mutex_);
  if (!started_) return nullptr;
  TimedBucketPtr bucket;
  if (buckets_.size() >= EventLog::kCapacity) {
    // Its events are used again, because creating one may wait for the device.
    if (buckets_.front()->enqueued) bucket = std::move(buckets_.front());
    buckets_.pop_front();
  }
  if (!bucket) bucket = std::make_shared<TimedBucket>(stream.device_type(), step);
  bucket->step = step;
  bucket->enqueued = false;
  bucket->ready.record(stream);
  buckets_.push_back(bucket);
  return bucket;
}

void BucketClock::complete(const TimedBucketPtr& bucket, const c10::Stream& stream) {
  if (!bucket) return;
  const std::lock_guard lock(mutex_);
  bucket->complete.record(stream);
  bucket->enqueued = true;
}

std::vector<BucketTime> BucketClock::times() const {
  const std::lock_guard lock(mutex_);
  std::vector<BucketTime> found;
  for (const TimedBucketPtr& bucket : buckets_) {
    // They complete in this order: behind one that fails, the engine takes no others.
    if (!bucket->enqueued || !bucket->ready.query() || !bucket->complete.query()) break;
    const c10::Event& first = buckets_.front()->ready;
    found.push_back(
        {bucket->step, first.elapsedTime(bucket->ready), first.elapsedTime(bucket->complete)});
  }
  return found;
}

}  // namespace gradferry
