// Which backward passes belong to one optimizer step: with exact_skip, skipping the step restores
// the residuals from before its first pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "parameter_hashes.h"

namespace gradferry {

class OptimizerSteps {
 public:
  // `loss_scale`: the scale tensor of a GradScaler. Every update(), and so every optimizer step,
  // writes to it, even if its value stays the same. Undefined: every pass counts as a step.
  explicit OptimizerSteps(at::Tensor loss_scale);

  // At the first bucket of a pass, on the thread that DDP calls from. Returns whether a step
  // begins. `parameters`: of the model.
  bool begin_pass(const ParameterHashes& parameters);
  // The next pass begins a step.
  void reset();
  // An optimizer has stepped. Any thread.
  void note_step() { noted_ = true; }

  // Whether the passes of the last step are known. False without a loss scale if the last two
  // passes may both belong to it.
  bool knows_last_step() const { return known_; }

 private:
  at::Tensor loss_scale_;
  std::optional<uint64_t> writes_;  // to loss scale or parameters, when the last pass began
  bool known_ = true;
  std::atomic<bool> noted_ = false;
};

// Throws Error(kState) unless the passes of the last step are known.
void expect_known_step(const OptimizerSteps& steps);

}  // namespace gradferry
