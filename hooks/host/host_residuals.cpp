#include "host/host_residuals.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/util/StringUtil.h>

#include <cmath>

#include "gradferry/error.h"

namespace gradferry {
namespace {

at::Tensor room_for(const at::Tensor& residual, bool keep_copy) {
  return at::zeros({keep_copy ? residual.numel() : 0}, residual.options());
}

}  // namespace

HostResiduals::HostResiduals(const Layout& layout, bool keep_copy)
    : layout_(layout),
      residuals_(c10::kCPU),
      keeps_copy_(keep_copy),
      worker_before_(room_for(worker_tensor(), keep_copy)),
      owner_before_(room_for(owner_tensor(), keep_copy)) {}

void HostResiduals::allocate() {
  residuals_ = Residuals(layout_, c10::kCPU);
  worker_before_ = room_for(worker_tensor(), keeps_copy_);
  owner_before_ = room_for(owner_tensor(), keeps_copy_);
  is_allocated_ = true;
}

uint64_t HostResiduals::num_bytes() const {
  return residuals_.num_bytes() + worker_before_.nbytes() + owner_before_.nbytes();
}

void HostResiduals::begin_step() {
  settle();
  step_nonfinite_ = false;
  if (!keeps_copy_) return;
  worker_before_.copy_(worker_tensor());
  owner_before_.copy_(owner_tensor());
  loss_scale_before_ = loss_scale_;
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

void HostResiduals::settle() {
  if (keeps_copy_ && step_nonfinite_) take_back();
}

void HostResiduals::skip() {
  take_back();
  step_nonfinite_ = false;
}

void HostResiduals::take_back() {
  worker_tensor().copy_(worker_before_);
  owner_tensor().copy_(owner_before_);
  loss_scale_ = loss_scale_before_;
}

void HostResiduals::load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale) {
  residuals_.load(worker, owner);
  loss_scale_ = loss_scale;
  step_nonfinite_ = false;
}

void HostResiduals::add_to_worker(uint64_t offset, const at::Tensor& values, float factor,
                                  float loss_scale) {
  const auto add = [&](const at::Tensor& worker, float& units) {
    if (units == 0.0F) units = loss_scale;
    const at::Tensor part = worker.narrow(0, static_cast<int64_t>(offset), values.numel());
    set_where_finite(part, part + values.to(at::kFloat) * (factor * units));
  };
  add(worker_tensor(), loss_scale_);
  if (keeps_copy_) add(worker_before_, loss_scale_before_);
}

void HostResiduals::scale_by_parameter(const Layout& layout, const std::vector<float>& factors) {
  gradferry::scale_by_parameter(layout, factors, worker_tensor(), owner_tensor());
  if (!keeps_copy_) return;
  gradferry::scale_by_parameter(layout, factors, worker_before_, owner_before_);
}

void HostResiduals::scale(float factor) {
  residuals_.scale(factor);
  for (const at::Tensor& before : {worker_before_, owner_before_}) {
    scale_where_finite(before, factor);
  }
}

}  // namespace gradferry
