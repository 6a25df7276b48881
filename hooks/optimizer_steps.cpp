#include "optimizer_steps.h"

#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "gradferry/error.h"

namespace gradferry {

OptimizerSteps::OptimizerSteps(at::Tensor loss_scale) : loss_scale_(std::move(loss_scale)) {}

uint64_t OptimizerSteps::writes_now(const ParameterHashes& parameters) const {
  return loss_scale_.defined() ? static_cast<uint64_t>(loss_scale_._version())
                               : parameters.writes();
}

bool OptimizerSteps::ended_before(uint64_t writes) const {
  return ended_ || !writes_ || *writes_ != writes;
}

bool OptimizerSteps::begins_step(const ParameterHashes& parameters) const {
  // Under join(), a rank without input gets here outside a backward pass, its optimizer does not
  // step and its scaler is not updated: it counts every pass as a step.
  const bool joined = torch::autograd::get_current_graph_task_id() == -1;
  return !loss_scale_.defined() || joined || ended_before(writes_now(parameters));
}

bool OptimizerSteps::begin_pass(const ParameterHashes& parameters) {
  const bool begins = begins_step(parameters);
  const uint64_t writes = writes_now(parameters);
  known_ = loss_scale_.defined() || ended_before(writes);
  writes_ = writes;
  ended_ = applied_ = false;
  return begins;
}

void OptimizerSteps::reset() {
  writes_.reset();
  ended_ = applied_ = false;
}

void OptimizerSteps::end(bool applied) {
  ended_ = true;
  applied_ = applied_ || applied;
}

void OptimizerSteps::expect_can_skip() const {
  GRADFERRY_EXPECTS(!applied_, kState,
                    "an optimizer has applied the gradients of the last step, so it cannot be "
                    "skipped any more; call skip_step() in place of the optimizer's step()");
  GRADFERRY_EXPECTS(known_, kState,
                    "the last two backward passes had no optimizer step between them, so it cannot "
                    "be told which of them belong to the step to be skipped; attach with "
                    "grad_scaler=, whose update() ends a step, or have all but the last pass of a "
                    "step run under no_sync(), and call skip_step() for every step you leave out");
}

}  // namespace gradferry
