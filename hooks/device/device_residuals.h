// The residuals of an engine on a device, with what a step decides about them there: their units,
// and with exact_skip whether the last step is to be taken back. Nothing here waits for the device
// unless it says so.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "residuals.h"

namespace gradferry {

class DeviceResiduals {
 public:
  // `keep_copy`: with exact_skip. Work of the current stream.
  DeviceResiduals(const Layout& layout, bool keep_copy, c10::Device device);

  float* worker() const { return residuals_.worker(); }
  float* owner() const { return residuals_.owner(); }
  const float* gain() const { return gain_.const_data_ptr<float>(); }
  // Kernels set it when a result of the step is not finite; null without exact_skip.
  uint32_t* step_nonfinite() const;
  uint64_t num_bytes() const;  // copies included
  // Everything that other streams than the current one will use.
  std::vector<at::Tensor> tensors() const;

  // On `stream`, when an optimizer step begins: takes the last one back if it was in vain, and
  // keeps a copy.
  void begin_step(const c10::Stream& stream);
  // On `stream`: finds the gain of a pass with this loss scale (one fp32 on the device; undefined:
  // 1). `begins_step`: nothing of its optimizer step is in vain yet.
  void begin_pass(const at::Tensor& loss_scale, bool begins_step, const c10::Stream& stream);

  // As gradferry::scale_by_parameter(), of what is kept as well. Work of the current stream, as
  // begin_step() or between steps.
  void scale_by_parameter(const Layout& layout, const std::vector<float>& factors) const;

  // The rest is called between steps, with the current stream behind all others. It may wait.

  // Takes the last step back if it is in vain, and stays so if more passes follow.
  void settle(const c10::Stream& current) const;
  // Takes the last step back, whatever it gave.
  void skip(const c10::Stream& current);
  void load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale);
  // As Residuals::add_to_worker().
  void add_to_worker(uint64_t offset, const at::Tensor& values, float factor,
                     const at::Tensor& loss_scale);
  void scale(float factor);
  // On the CPU.
  at::Tensor worker_copy() const { return residuals_.worker_tensor().cpu(); }
  at::Tensor owner_copy() const { return residuals_.owner_tensor().cpu(); }
  float loss_scale() const;

 private:
  // What takes part in a step, and the copy of each.
  struct Kept {
    at::Tensor now;
    at::Tensor before;
  };
  void take_back(const c10::Stream& stream) const;

  Residuals residuals_;
  at::Tensor scale_, gain_;  // one fp32 each
  std::vector<Kept> kept_;   // worker, owner, scale_; empty without exact_skip
  at::Tensor step_nonfinite_;
};

}  // namespace gradferry
