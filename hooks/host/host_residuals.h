// The residuals of the host's engine, with what a step decides about them: their units, and with
// exact_skip whether the last optimizer step is to be taken back. DeviceResiduals is the same on a
// device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "residuals.h"

namespace gradferry {

class HostResiduals {
 public:
  // `keep_copy`: with exact_skip.
  HostResiduals(const Layout& layout, bool keep_copy);

  float* worker() const { return residuals_.worker(); }
  float* owner() const { return residuals_.owner(); }
  const at::Tensor& worker_tensor() const { return residuals_.worker_tensor(); }
  const at::Tensor& owner_tensor() const { return residuals_.owner_tensor(); }
  uint64_t num_bytes() const;  // the copy included
  // 0 before the first step: residuals that are zero have no units.
  float loss_scale() const { return loss_scale_; }

  // When an optimizer step begins: takes the last one back if its result was not finite, and keeps
  // a copy.
  void begin_step();
  // Returns the factor, for codecs, that brings the residuals to the units of a pass with this loss
  // scale.
  float begin_pass(float loss_scale);
  // A result of the optimizer step is not finite.
  void note_nonfinite() { step_nonfinite_ = true; }

  // The rest is called between steps.

  // Takes the last step back if its result is not finite, and stays so if more passes follow.
  void settle();
  // Takes the last step back, whatever it gave.
  void skip();
  void load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale);
  // worker[offset ..] += factor * values, where that is finite. `values` is unscaled; `loss_scale`
  // is that of the next step, and counts when there were no units yet. Like scale(), it changes
  // what is kept as well.
  void add_to_worker(uint64_t offset, const at::Tensor& values, float factor, float loss_scale);
  void scale(float factor);
  // As gradferry::scale_by_parameter(), of what is kept as well. Also at the beginning of a step.
  void scale_by_parameter(const Layout& layout, const std::vector<float>& factors);

 private:
  void take_back();

  Residuals residuals_;
  float loss_scale_ = 0.0F;
  const bool keeps_copy_;
  at::Tensor worker_before_;  // without elements unless a copy is kept
  at::Tensor owner_before_;
  float loss_scale_before_ = 0.0F;
  bool step_nonfinite_ = false;
};

}  // namespace gradferry
