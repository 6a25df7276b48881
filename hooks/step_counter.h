// Finds the step of a bucket. DDP's bucket index and is_last are unreliable, so a step begins when
// a bucket has a parameter that was already seen in the current step, or after end().
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace gradferry {

class StepCounter {
 public:
  explicit StepCounter(size_t num_parameters) : seen_(num_parameters, false) {}

  // Counts a bucket that goes to the engine. Returns whether it is the first such one of its step.
  bool add(const std::vector<uint32_t>& parameters) {
    pass(parameters);
    current_.push_back(parameters);
    return current_.size() == 1;
  }
  // Counts a bucket that passes through.
  void pass(const std::vector<uint32_t>& parameters) {
    const bool begins = std::any_of(parameters.begin(), parameters.end(),
                                    [&](uint32_t index) { return seen_[index]; });
    if (begins) {
      restart(step_ + 1);
      finished_ = std::exchange(current_, {});
    }
    for (const uint32_t index : parameters) seen_[index] = true;
  }

  // The current step, if it has begun, gets no more buckets, although some parameters had none.
  void end() {
    if (num_seen() != 0) std::fill(seen_.begin(), seen_.end(), true);
  }

  uint64_t step() const { return step_; }
  // A step counts from its first bucket, also if that passes through.
  uint64_t finished_steps() const { return step_ + (num_seen() == 0 ? 0 : 1); }
  // Whether the current step has a bucket that went to the engine.
  bool began() const { return !current_.empty(); }
  size_t num_parameters() const { return seen_.size(); }
  size_t num_seen() const {
    return static_cast<size_t>(std::count(seen_.begin(), seen_.end(), true));
  }
  // Parameters by bucket, of the last finished step.
  const std::vector<std::vector<uint32_t>>& finished() const { return finished_; }

  // The next bucket begins `step`.
  void resume(uint64_t step) {
    restart(step);
    current_.clear();
  }

 private:
  void restart(uint64_t step) {
    step_ = step;
    std::fill(seen_.begin(), seen_.end(), false);
  }

  uint64_t step_ = 0;
  std::vector<bool> seen_;  // by parameter
  std::vector<std::vector<uint32_t>> current_;
  std::vector<std::vector<uint32_t>> finished_;
};

}  // namespace gradferry
