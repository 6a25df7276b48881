#include "host/host_residuals.h"

#include <ATen/TensorOperators.h>
#include <c10/util/StringUtil.h>

#include <cmath>

#include "gradferry/error.h"

namespace gradferry {

void HostResiduals::allocate() {
  residuals_ = Residuals(layout_, c10::kCPU);
  is_allocated_ = true;
}

void HostResiduals::begin_pass(float loss_scale) {
  const float gain = loss_scale_ == 0.0F ? 1.0F : loss_scale / loss_scale_;
  GRADFERRY_EXPECTS(
      std::isfinite(gain), kState,
      c10::str("residuals are in units of a loss scale of ", loss_scale_, ", which cannot become ",
               loss_scale, "; load a state that was saved with a loss scale near this one"));
  loss_scale_ = loss_scale;
  if (gain != 1.0F) residuals_.scale(gain);
}

void HostResiduals::load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale) {
  residuals_.load(worker, owner);
  loss_scale_ = loss_scale;
}

void HostResiduals::add_to_worker(uint64_t offset, const at::Tensor& values, float factor,
                                  float loss_scale) {
  if (loss_scale_ == 0.0F) loss_scale_ = loss_scale;
  const at::Tensor part = worker_tensor().narrow(0, static_cast<int64_t>(offset), values.numel());
  set_where_finite(part, part + values.to(at::kFloat) * (factor * loss_scale_));
}

}  // namespace gradferry
