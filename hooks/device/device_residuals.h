// The residuals of an engine on a device, with their units: the loss scale. Functions do not wait
// for the device unless their comment says so.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <vector>

#include "residuals.h"

namespace gradferry {

class DeviceResiduals : public Residuals {
 public:
  // Allocates and zeroes on the current stream.
  DeviceResiduals(const Layout& layout, c10::Device device);

  // All tensors that streams other than the current one will use.
  std::vector<at::Tensor> tensors() const {
    return {worker_tensor(), owner_tensor(), scale_, gain_};
  }

  // On `stream`: converts the residuals to the units of a pass with this loss scale (one fp32 on
  // the device; undefined: 1), those of buckets that will not come, too.
  void begin_pass(const at::Tensor& loss_scale, const c10::Stream& stream);

  // Call the rest between steps, when the work of all other streams is done. It may wait for the
  // device.

  void load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale);
  // worker[offset ..] += factor * values, where that is finite. `values` is not multiplied by a
  // loss scale. `loss_scale` is that of the next step; it sets the units if there were none.
  void add_to_worker(uint64_t offset, const at::Tensor& values, float factor,
                     const at::Tensor& loss_scale);
  float loss_scale() const;

 private:
  at::Tensor scale_, gain_;  // one fp32 each
};

}  // namespace gradferry
