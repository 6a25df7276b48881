// The residuals of an engine on a device, with their units (the loss scale) and, with exact_skip,
// the copy that restores them after a skipped optimizer step. Functions do not wait for the device
// unless their comment says so. A step is "in vain" if a result of it is not finite.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "residuals.h"

namespace gradferry {

class DeviceResiduals {
 public:
  // `keep_copy`: with exact_skip. Allocates and zeroes on the current stream.
  DeviceResiduals(const Layout& layout, bool keep_copy, c10::Device device);

  float* worker() const { return residuals_.worker(); }
  float* owner() const { return residuals_.owner(); }
  // Kernels set it when a result of the step is not finite; null without exact_skip.
  uint32_t* step_nonfinite() const;
  uint64_t num_bytes() const;  // copies included
  // All tensors that streams other than the current one will use.
  std::vector<at::Tensor> tensors() const;

  // Begins an optimizer step on `stream`: restores the residuals if the result of the last step was
  // not finite, then copies them.
  void begin_step(const c10::Stream& stream);
  // On `stream`: converts the residuals to the units of a pass with this loss scale (one fp32 on
  // the device; undefined: 1), those of buckets that will not come, too. `begins_step`: clears
  // step_nonfinite, because an optimizer step begins.
  void begin_pass(const at::Tensor& loss_scale, bool begins_step, const c10::Stream& stream);

  // Does what gradferry::scale_by_parameter() does, also with the copies. On the current stream,
  // where begin_step() is called, or between steps.
  void scale_by_parameter(const Layout& layout, const std::vector<float>& factors) const;

  // The last step stays, whatever its results were. Call it before the next one begins.
  void keep() { keeps_step_ = true; }

  // Call the rest between steps, when the work of all other streams is done. It may wait for the
  // device.

  // Restores the residuals if the result of the last step is not finite; the step stays so if more
  // passes follow.
  void settle(const c10::Stream& current) const;
  // Restores the residuals from before the last step.
  void skip(const c10::Stream& current);
  void load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale);
  // Does what HostResiduals::add_to_worker() does; `values` and `loss_scale` are on the device.
  void add_to_worker(uint64_t offset, const at::Tensor& values, float factor,
                     const at::Tensor& loss_scale);
  void scale(float factor);
  // On the device.
  const at::Tensor& worker_tensor() const { return residuals_.worker_tensor(); }
  const at::Tensor& owner_tensor() const { return residuals_.owner_tensor(); }
  float loss_scale() const;

 private:
  // A tensor that a step changes, and its copy from before the step.
  struct Kept {
    at::Tensor now;
    at::Tensor before;
  };
  void take_back(const c10::Stream& stream) const;

  Residuals residuals_;
  at::Tensor scale_, gain_;  // one fp32 each
  std::vector<Kept> kept_;   // worker, owner, scale_; empty without exact_skip
  at::Tensor step_nonfinite_;
  bool keeps_step_ = false;  // the last one
};

}  // namespace gradferry
