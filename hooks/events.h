// Where the time of buckets goes: the last 256 of them, and sums over all steps.
//
// Times are taken where the work is done and never wait for anything. `encode` runs on the thread
// that DDP calls from, `network`, `reduce` and `decode` on the finishing thread: `network` is its
// waiting for messages, their checks included. The four are also ranges in torch.profiler, as
// "gradferry::encode" and so on.
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

// A residual beside the gradient it was withheld from: sums of squares over the same tiles.
struct ResidualSquares {
  double residual = 0;
  double gradient = 0;

  void operator+=(const ResidualSquares& other) {
    residual += other.residual;
    gradient += other.gradient;
  }
  // Of their norms; 0 without a gradient.
  double ratio() const;
};

// One bucket. Instants are nanoseconds on std::chrono::steady_clock, 0 for what did not happen.
struct BucketEvent {
  uint64_t step = 0;
  uint64_t bucket = 0;  // counted since the engine started
  uint64_t chunks = 0;
  uint64_t gradient_bytes = 0;
  int64_t begin_ns = 0;     // DDP handed the bucket in
  int64_t encoded_ns = 0;   // its last chunk was posted, and DDP's thread went on
  int64_t complete_ns = 0;  // its gradients were there
  // Nanoseconds, over all chunks.
  int64_t encode_ns = 0;
  int64_t network_ns = 0;
  int64_t reduce_ns = 0;
  int64_t decode_ns = 0;
  // Of a sample of the bucket's tiles.
  ResidualSquares worker = {};
  ResidualSquares owner = {};
};

// Sums over steps, in nanoseconds.
struct StepTimes {
  int64_t encode_ns = 0;
  int64_t network_ns = 0;
  int64_t reduce_ns = 0;
  int64_t decode_ns = 0;
  // What DDP's thread was held up: inside the hook, and after its last bucket until all were
  // complete.
  int64_t exposed_ns = 0;
  // Of the last step.
  ResidualSquares worker = {};
  ResidualSquares owner = {};
};

class EventLog {
 public:
  static constexpr size_t kCapacity = 256;
  static constexpr size_t kInErrors = 8;

  static int64_t now();
  // A bucket that is complete, or, with complete_ns 0, will never be.
  void add(const BucketEvent& event);
  StepTimes totals() const;
  std::vector<BucketEvent> events() const;  // oldest first
  // A line per bucket, the last few, for errors.
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

// Adds the time of its life to a sum, and is a range of that name in torch.profiler.
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

// The profiler at work on the thread that made this: torch's profiler looks at threads one by one,
// and does not know the finishing thread.
class ProfilerContext {
 public:
  ProfilerContext();
  // Lets go of it. The profiler may hold Python objects, so its last owner must not be the
  // finishing thread, which has no GIL: clear before whoever waits for the bucket goes on.
  void clear();

  // Has the profiler look at this thread, for as long as the guard lives.
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
