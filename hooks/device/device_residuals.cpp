#include "device/device_residuals.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/StreamGuard.h>

#include "gradferry/device_library.h"

namespace gradferry {

DeviceResiduals::DeviceResiduals(const Layout& layout, bool keep_copy, c10::Device device)
    : residuals_(layout, device) {
  const auto single = at::TensorOptions().dtype(at::kFloat).device(device);
  scale_ = at::zeros({1}, single);
  gain_ = at::zeros({1}, single);
  if (!keep_copy) return;
  for (const at::Tensor& now : {residuals_.worker_tensor(), residuals_.owner_tensor(), scale_}) {
    kept_.push_back({now, at::zeros_like(now)});
  }
  step_nonfinite_ = at::zeros({1}, single.dtype(at::kInt));
}

uint32_t* DeviceResiduals::step_nonfinite() const {
  return step_nonfinite_.defined() ? static_cast<uint32_t*>(step_nonfinite_.mutable_data_ptr())
                                   : nullptr;
}

std::vector<at::Tensor> DeviceResiduals::tensors() const {
  std::vector<at::Tensor> all = {residuals_.worker_tensor(), residuals_.owner_tensor(), scale_,
                                 gain_};
  for (const Kept& kept : kept_) all.push_back(kept.before);
  if (step_nonfinite_.defined()) all.push_back(step_nonfinite_);
  return all;
}

uint64_t DeviceResiduals::num_bytes() const {
  uint64_t bytes = residuals_.num_bytes();
  for (const Kept& kept : kept_) bytes += kept.before.nbytes();
  return bytes;
}

void DeviceResiduals::take_back(const c10::Stream& stream) const {
  for (const Kept& kept : kept_) {
    message_kernels().take_back({.step_nonfinite = step_nonfinite(),
                                 .values = kept.now.mutable_data_ptr<float>(),
                                 .before = kept.before.const_data_ptr<float>(),
                                 .num_elements = static_cast<uint64_t>(kept.now.numel()),
                                 .stream = stream.native_handle()});
  }
}

void DeviceResiduals::begin_step(const c10::Stream& stream) {
  settle(stream);
  keeps_step_ = false;
  const c10::StreamGuard guard(stream);
  for (const Kept& kept : kept_) kept.before.copy_(kept.now, /*non_blocking=*/true);
}

void DeviceResiduals::begin_pass(const at::Tensor& loss_scale, bool begins_step,
                                 const c10::Stream& stream) {
  message_kernels().rescale(
      {.loss_scale = loss_scale.defined() ? loss_scale.const_data_ptr<float>() : nullptr,
       .residual_scale = scale_.mutable_data_ptr<float>(),
       .gain = gain_.mutable_data_ptr<float>(),
       .step_nonfinite = begins_step ? step_nonfinite() : nullptr,
       .stream = stream.native_handle()});
  if (!loss_scale.defined()) return;  // units never change then
  // Only the device knows whether the gain is 1.
  for (const at::Tensor& residual : {residuals_.worker_tensor(), residuals_.owner_tensor()}) {
    message_kernels().scale({.factor = gain_.const_data_ptr<float>(),
                             .values = residual.mutable_data_ptr<float>(),
                             .num_elements = static_cast<uint64_t>(residual.numel()),
                             .stream = stream.native_handle()});
  }
}

void DeviceResiduals::scale_by_parameter(const Layout& layout,
                                         const std::vector<float>& factors) const {
  gradferry::scale_by_parameter(layout, factors, residuals_.worker_tensor(),
                                residuals_.owner_tensor());
  if (kept_.empty()) return;
  gradferry::scale_by_parameter(layout, factors, kept_[0].before, kept_[1].before);
}

void DeviceResiduals::settle(const c10::Stream& current) const {
  if (!keeps_step_) take_back(current);
}

void DeviceResiduals::skip(const c10::Stream& current) {
  if (kept_.empty()) return;
  step_nonfinite_.fill_(1);
  take_back(current);
  step_nonfinite_.fill_(0);
}

void DeviceResiduals::scale(float factor) {
  residuals_.scale(factor);
  for (const Kept& kept : kept_) {
    if (!kept.now.is_same(scale_)) set_where_finite(kept.before, kept.before * factor);
  }
}

void DeviceResiduals::load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale) {
  residuals_.load(worker, owner);
  scale_.fill_(loss_scale);
  if (step_nonfinite_.defined()) step_nonfinite_.fill_(0);
}

void DeviceResiduals::add_to_worker(uint64_t offset, const at::Tensor& values, float factor,
                                    const at::Tensor& loss_scale) {
  const at::Tensor next = loss_scale.defined() ? loss_scale.reshape({1}) : at::ones_like(scale_);
  const auto add = [&](const at::Tensor& worker, const at::Tensor& units) {
    units.copy_(at::where(units == 0, next, units));
    const at::Tensor part = worker.narrow(0, static_cast<int64_t>(offset), values.numel());
    set_where_finite(part, part + values.to(at::kFloat) * (units * factor));
  };
  add(residuals_.worker_tensor(), scale_);
  if (!kept_.empty()) add(kept_.front().before, kept_.back().before);
}

float DeviceResiduals::loss_scale() const { return scale_.cpu().item<float>(); }

}  // namespace gradferry
