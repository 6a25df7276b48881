// Times of buckets by the device's own clock, for codec="auto": the host runs ahead of the device,
// so its own times say nothing about a step.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace gradferry {

// Two events that keep the time. Empty as long as nobody asked for times.
struct TimedBucket {
  TimedBucket(c10::DeviceType type, uint64_t of_step)
      : step(of_step),
        ready(type, c10::EventFlag::BACKEND_DEFAULT),
        complete(type, c10::EventFlag::BACKEND_DEFAULT) {}
  uint64_t step;
  c10::Event ready, complete;
  bool enqueued = false;  // both events are recorded
};
using TimedBucketPtr = std::shared_ptr<TimedBucket>;

// In milliseconds since the oldest bucket that is known was ready.
struct BucketTime {
  uint64_t step;
  double ready_ms;     // its gradients were computed
  double complete_ms;  // its averaged gradients were there
};

class BucketClock {
 public:
  // From now on buckets are timed; the last EventLog::kCapacity are kept.
  void start();
  // Null unless started. Records `ready` on the stream.
  TimedBucketPtr ready(uint64_t step, const c10::Stream& stream);
  // Records `complete` on the stream; `bucket` may be null.
  void complete(const TimedBucketPtr& bucket, const c10::Stream& stream);
  // Of the buckets that the device has finished, oldest first.
  std::vector<BucketTime> times() const;

 private:
  mutable std::mutex mutex_;
  bool started_ = false;
  std::deque<TimedBucketPtr> buckets_;
};

}  // namespace gradferry
