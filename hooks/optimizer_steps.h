// Which backward passes belong to one optimizer step: with exact_skip, skipping the step restores
// the residuals from before its first pass.
//
// A pass begins a step if the last one has ended. An optimizer that steps ends it, as does
// update() of a GradScaler, which also follows a step that the scaler has skipped. Without a
// GradScaler nobody says that a step was skipped, so that every pass is a step of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "parameter_hashes.h"

namespace gradferry {

class OptimizerSteps {
 public:
  // `loss_scale`: the scale tensor of a GradScaler. Every update() writes to it, even if its value
  // stays the same. Undefined: there is none.
  explicit OptimizerSteps(at::Tensor loss_scale);

  // Whether the pass that begins now begins a step, on the thread that DDP calls from.
  // `parameters`: of the model.
  bool begins_step(const ParameterHashes& parameters) const;
  // At the first bucket of a pass; returns the same.
  bool begin_pass(const ParameterHashes& parameters);
  // The next pass begins a step, and nothing is left to take back.
  void reset();
  // The passes so far are a step that has ended. `applied`: an optimizer has used their gradients.
  void end(bool applied);

  // Throws Error(kState) unless the last step can be taken back: no optimizer has applied it, and
  // its passes are known. Without a GradScaler they are not if the last two passes may both belong
  // to it.
  void expect_can_skip() const;

 private:
  // Counts writes to the loss scale, or to the parameters.
  uint64_t writes_now(const ParameterHashes& parameters) const;
  // Whether a step that ended lies before a pass that begins at this count.
  bool ended_before(uint64_t writes) const;

  at::Tensor loss_scale_;
  std::optional<uint64_t> writes_;  // to loss scale or parameters, when the last pass began
  bool known_ = true;
  bool ended_ = false;
  bool applied_ = false;
};

}  // namespace gradferry
