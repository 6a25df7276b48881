// Times of the last 256 buckets, and sums over all steps.
//
// Each thread times its own work, so nothing waits for these times. `encode` runs on the thread on
// which DDP calls the hook; with nodes of several ranks only copies for siblings do, and sums and
// encoding run on the finishing thread, as `network`, `reduce` and `decode` always do. `network` is
// the time it waits for messages and checks them. The four are also ranges in torch.profiler,
// named "gradferry::encode" and so on.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gradferry {

// Sums of squares of a residual and of the gradient it comes from, over the same tiles.
struct ResidualSquares {
  double residual = 0;
  double gradient = 0;

  void operator+=(const ResidualSquares& other) {
    residual += other.residual;
    gradient += other.gradient;
  }
  // Norm of the residual over norm of the gradient; 0 if the gradient is zero.
  double ratio() const;
};

// One bucket. begin, encoded and complete are points in time, in nanoseconds on
// std::chrono::steady_clock; 0: it did not happen.
struct BucketEvent {
  uint64_t step = 0;
  uint64_t bucket = 0;  // counted since the engine started
  uint64_t chunks = 0;
  uint64_t gradient_bytes = 0;
  int64_t begin_ns = 0;     // DDP passed the bucket to the hook
  int64_t encoded_ns = 0;   // its last chunk was posted, and DDP's thread continued
  int64_t complete_ns = 0;  // its averaged gradients were complete
  // Durations in nanoseconds, summed over all chunks.
  int64_t encode_ns = 0;
  int64_t network_ns = 0;
  int64_t reduce_ns = 0;
  int64_t decode_ns = 0;
  // Squares on a sample of the bucket's tiles.
  ResidualSquares worker = {};
  ResidualSquares owner = {};
};

// Sums over steps, in nanoseconds.
struct StepTimes {
  int64_t encode_ns = 0;
  int64_t network_ns = 0;
  int64_t reduce_ns = 0;
  int64_t decode_ns = 0;
  // Delay of DDP's thread: time inside the hook, and after its last bucket until all were complete.
  int64_t exposed_ns = 0;
  // Squares of the last step.
  ResidualSquares worker = {};
  ResidualSquares owner = {};
};

class EventLog {
 public:
  static constexpr size_t kCapacity = 256;
  static constexpr size_t kInErrors = 8;

  static int64_t now();
  // Adds a bucket that is complete or, with complete_ns 0, never will be.
  void add(const BucketEvent& event);
  StepTimes totals() const;
  std::vector<BucketEvent> events() const;  // oldest first
  // The last kInErrors buckets, one line each, for error messages.
  std::string text(uint32_t rank) const;

 private:
  using Clock = std::chrono::steady_clock;
  // The step whose buckets come in now.
  struct CurrentStep {
    uint64_t step = 0;
    int64_t held_ns = 0;
    int64_t last_encoded_ns = 0;
    int64_t last_complete_ns = 0;
    ResidualSquares worker, owner;

    int64_t exposed_ns() const;
  };

  const int64_t start_ns_ = now();
  mutable std::mutex mutex_;
  std::deque<BucketEvent> events_;
  StepTimes totals_;  // exposed_ns without the current step
  CurrentStep current_;
};

// Adds its lifetime to a sum, and records a range of that name in torch.profiler.
class TimedRange {
 public:
  TimedRange(const char* name, int64_t& sum);
  ~TimedRange();
  TimedRange(const TimedRange&) = delete;
  TimedRange& operator=(const TimedRange&) = delete;

 private:
  at::RecordFunction range_;
  int64_t& sum_;
  const std::chrono::steady_clock::time_point start_;
};

// The profiler state of the thread that creates this. torch's profiler records threads separately,
// and does not know the finishing thread.
class ProfilerContext {
 public:
  ProfilerContext();
  // Drops the state. The profiler may hold Python objects, so the finishing thread, which has no
  // GIL, must not be its last owner: call this before the bucket's Future completes.
  void clear();

  // The profiler records this thread for as long as the guard lives.
  class Guard {
   public:
    explicit Guard(const ProfilerContext& context);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    std::shared_ptr<c10::ThreadLocalDebugInfo> info_before_;
    at::RecordFunctionTLS record_before_;
  };

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> info_;
  at::RecordFunctionTLS record_;
};

}  // namespace gradferry
