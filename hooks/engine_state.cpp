// The engine between steps: its counters, and what a checkpoint or an optimizer does to residuals.
#include <algorithm>
#include <cmath>

#include "engine.h"

namespace gradferry {

EngineStats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.wire_bytes = wire_bytes_.load(std::memory_order_relaxed);
  stats.times = log_.totals();
  return stats;
}

uint64_t Engine::current_step() const {
  const std::lock_guard lock(mutex_);
  return stats_.steps;
}

// `what` is to be done. With mutex_ held.
void Engine::expect_between_steps(const char* what) const {
  if (death_) throw Error(*death_);
  const auto seen = std::count(seen_in_step_.begin(), seen_in_step_.end(), true);
  const bool complete = seen == 0 || static_cast<size_t>(seen) == seen_in_step_.size();
  GRADFERRY_EXPECTS(stats_.in_flight == 0 && !running_ && complete, kState,
                    std::string("cannot ") + what + " in the middle of step " +
                        std::to_string(stats_.steps) + ": " + std::to_string(seen) + " of " +
                        std::to_string(seen_in_step_.size()) + " gradients were handed over, " +
                        std::to_string(stats_.in_flight) +
                        " buckets are in flight; do it after backward() returned");
}

// Takes back what an optimizer step with exact_skip did so far, if it is in vain: it stays so if
// more passes follow. With mutex_ held.
void Engine::settle() {
  if (options_.exact_skip && step_nonfinite_) residuals_.take_back();
}

float Engine::loss_scale() const {
  if (!options_.loss_scale.defined()) return 1.0F;
  const auto scale = *options_.loss_scale.const_data_ptr<float>();
  GRADFERRY_EXPECTS(
      std::isfinite(scale) && scale > 0.0F, kState,
      "the GradScaler's scale is " + std::to_string(scale) + "; it must be positive and finite");
  return scale;
}

EngineState Engine::state() {
  const std::lock_guard lock(mutex_);
  expect_between_steps("save the state");
  settle();
  const bool began = !current_buckets_.empty();
  return {stats_.steps + (began ? 1 : 0), residuals_.worker_tensor().clone(),
          residuals_.owner_tensor().clone(), residuals_.loss_scale()};
}

void Engine::load_state(const EngineState& state) {
  const std::lock_guard lock(mutex_);
  expect_between_steps("load a state");
  residuals_.load(state.worker_residual, state.owner_residual, state.loss_scale);
  stats_.steps = state.steps;
  std::fill(seen_in_step_.begin(), seen_in_step_.end(), false);
  current_buckets_.clear();
  step_began_ = false;
  step_nonfinite_ = false;
  optimizer_steps_.reset();
}

void Engine::skip_step() {
  const std::lock_guard lock(mutex_);
  expect_between_steps("skip a step");
  GRADFERRY_EXPECTS(options_.exact_skip, kState,
                    "a step can be skipped without loss only with exact_skip=True");
  if (!step_began_ || options_.in_warmup(stats_.steps)) return;
  expect_known_step(optimizer_steps_);
  residuals_.take_back();
  step_nonfinite_ = false;
  optimizer_steps_.reset();
}

void Engine::add_to_worker_residual(uint32_t parameter, const at::Tensor& values, float factor) {
  const std::lock_guard lock(mutex_);
  expect_between_steps("change a residual");
  const Parameter& target = parameter_to_change(layout_, parameter, values, c10::kCPU);
  settle();
  residuals_.add_to_worker(target.worker_residual, values, factor, loss_scale());
}

void Engine::scale_residuals(float factor) {
  const std::lock_guard lock(mutex_);
  expect_between_steps("scale residuals");
  settle();
  residuals_.scale(factor);
}

}  // namespace gradferry
