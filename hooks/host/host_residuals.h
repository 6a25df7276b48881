// The residuals of the host's engine, with their units (the loss scale) and, with exact_skip, the
// copy that restores them after a skipped optimizer step. DeviceResiduals is the same on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "residuals.h"

namespace gradferry {

class HostResiduals {
 public:
  // `keep_copy`: with exact_skip. Without memory before allocate().
  HostResiduals(const Layout& layout, bool keep_copy);
  // Zeros.
  void allocate();
  bool is_allocated() const { return is_allocated_; }

  float* worker() const { return residuals_.worker(); }
  float* owner() const { return residuals_.owner(); }
  const at::Tensor& worker_tensor() const { return residuals_.worker_tensor(); }
  const at::Tensor& owner_tensor() const { return residuals_.owner_tensor(); }
  uint64_t num_bytes() const;  // the copy included
  // 0 before the first step: residuals that are zero have no units.
  float loss_scale() const { return loss_scale_; }

  // Begins an optimizer step: restores the residuals if the result of the last one was not finite,
  // then copies them.
  void begin_step();
  // Begins a pass with this loss scale: converts the residuals to its units, those of buckets that
  // will not come, too. Throws Error(kState) if no finite factor does.
  void begin_pass(float loss_scale);
  // Notes that a result of the optimizer step is not finite.
  void note_nonfinite() { step_nonfinite_ = true; }
  // The last step stays, whatever its results were.
  void keep() { step_nonfinite_ = false; }

  // Call the rest between steps.

  // Restores the residuals if the result of the last step is not finite; the step still counts as
  // not finite if more of its passes follow.
  void settle();
  // Restores the residuals from before the last step.
  void skip();
  void load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale);
  // worker[offset ..] += factor * values, where that is finite. `values` is not multiplied by a
  // loss scale. `loss_scale` is that of the next step; it sets the units if there were none. Like
  // scale(), it also changes the copy.
  void add_to_worker(uint64_t offset, const at::Tensor& values, float factor, float loss_scale);
  void scale(float factor);
  // Does what gradferry::scale_by_parameter() does, to the copy as well. Also at the beginning of a
  // step.
  void scale_by_parameter(const Layout& layout, const std::vector<float>& factors);

 private:
  void take_back();

  const Layout& layout_;
  Residuals residuals_;
  bool is_allocated_ = false;
  float loss_scale_ = 0.0F;
  const bool keeps_copy_;
  at::Tensor worker_before_;  // empty unless a copy is kept
  at::Tensor owner_before_;
  float loss_scale_before_ = 0.0F;
  bool step_nonfinite_ = false;
};

}  // namespace gradferry
