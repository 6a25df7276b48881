// The residuals of the host's engine, with their units: the loss scale. DeviceResiduals is the same
// on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "residuals.h"

namespace gradferry {

class HostResiduals {
 public:
  // Without memory before allocate().
  explicit HostResiduals(const Layout& layout) : layout_(layout), residuals_(c10::kCPU) {}
  // Zeros.
  void allocate();
  bool is_allocated() const { return is_allocated_; }

  float* worker() const { return residuals_.worker(); }
  float* owner() const { return residuals_.owner(); }
  const at::Tensor& worker_tensor() const { return residuals_.worker_tensor(); }
  const at::Tensor& owner_tensor() const { return residuals_.owner_tensor(); }
  uint64_t num_bytes() const { return residuals_.num_bytes(); }
  // 0 before the first step: residuals that are zero have no units.
  float loss_scale() const { return loss_scale_; }

  // Begins a pass with this loss scale: converts the residuals to its units, those of buckets that
  // will not come, too. Throws Error(kState) if no finite factor does.
  void begin_pass(float loss_scale);

  // Call the rest between steps.

  void load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale);
  // worker[offset ..] += factor * values, where that is finite. `values` is not multiplied by a
  // loss scale. `loss_scale` is that of the next step; it sets the units if there were none.
  void add_to_worker(uint64_t offset, const at::Tensor& values, float factor, float loss_scale);
  void scale(float factor) { residuals_.scale(factor); }
  // Does what gradferry::scale_by_parameter() does. Also at the beginning of a step.
  void scale_by_parameter(const Layout& layout, const std::vector<float>& factors) {
    gradferry::scale_by_parameter(layout, factors, worker_tensor(), owner_tensor());
  }

 private:
  const Layout& layout_;
  Residuals residuals_;
  bool is_allocated_ = false;
  float loss_scale_ = 0.0F;
};

}  // namespace gradferry
