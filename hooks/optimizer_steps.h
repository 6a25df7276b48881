// Which passes belong to one optimizer step: with exact_skip their residuals are taken back
// together.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "parameter_hashes.h"

namespace gradferry {

class OptimizerSteps {
 public:
  // `loss_scale`: of a GradScaler. Every update(), and so every optimizer step, writes it, if only
  // the number that was there before. Undefined: every pass counts as a step of its own.
  explicit OptimizerSteps(at::Tensor loss_scale);

  // At the first bucket of a pass, on the thread that DDP calls from. Returns whether a step
  // begins. `parameters`: of the model.
  bool begin_pass(const ParameterHashes& parameters);
  // The next pass begins a step.
  void reset();
  // An optimizer has stepped. Any thread.
  void note_step() { noted_ = true; }

  // Whether it is known which passes the last step has: false without a loss scale when the last
  // two may both belong to it.
  bool knows_last_step() const { return known_; }

 private:
  at::Tensor loss_scale_;
  std::optional<uint64_t> writes_;  // of the loss scale or to parameters, when the last pass began
  bool known_ = true;
  std::atomic<bool> noted_ = false;
};

// Throws Error(kState) unless the passes of the last step are known.
void expect_known_step(const OptimizerSteps& steps);

}  // namespace gradferry
