// The residuals of an engine on a device, with their units: the loss scale. Functions do not wait
// for the device unless their comment says so.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

#include "residuals.h"

namespace gradferry {

class DeviceResiduals {
 public:
  // Allocates and zeroes on the current stream.
  DeviceResiduals(const Layout& layout, c10::Device device);

  float* worker() const { return residuals_.worker(); }
  float* owner() const { return residuals_.owner(); }
  uint64_t num_bytes() const { return residuals_.num_bytes(); }
  // All tensors that streams other than the current one will use.
  std::vector<at::Tensor> tensors() const {
    return {worker_tensor(), owner_tensor(), scale_, gain_};
  }

  // On `stream`: converts the residuals to the units of a pass with this loss scale (one fp32 on
  // the device; undefined: 1), those of buckets that will not come, too.
  void begin_pass(const at::Tensor& loss_scale, const c10::Stream& stream);

  // Does what gradferry::scale_by_parameter() does. On the current stream, before begin_pass() or
  // between steps.
  void scale_by_parameter(const Layout& layout, const std::vector<float>& factors) const {
    gradferry::scale_by_parameter(layout, factors, worker_tensor(), owner_tensor());
  }

  // Call the rest between steps, when the work of all other streams is done. It may wait for the
  // device.

  void load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale);
  // Does what HostResiduals::add_to_worker() does; `values` and `loss_scale` are on the device.
  void add_to_worker(uint64_t offset, const at::Tensor& values, float factor,
                     const at::Tensor& loss_scale);
  void scale(float factor) { residuals_.scale(factor); }
  // On the device.
  const at::Tensor& worker_tensor() const { return residuals_.worker_tensor(); }
  const at::Tensor& owner_tensor() const { return residuals_.owner_tensor(); }
  float loss_scale() const;

 private:
  Residuals residuals_;
  at::Tensor scale_, gain_;  // one fp32 each
};

}  // namespace gradferry
