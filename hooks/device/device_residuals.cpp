#include "device/device_residuals.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "gradferry/device_library.h"

namespace gradferry {

DeviceResiduals::DeviceResiduals(const Layout& layout, c10::Device device)
    : Residuals(layout, device) {
  const auto single = at::TensorOptions().dtype(at::kFloat).device(device);
  scale_ = at::zeros({1}, single);
  gain_ = at::zeros({1}, single);
}

void DeviceResiduals::begin_pass(const at::Tensor& loss_scale, const c10::Stream& stream) {
  message_kernels().rescale(
      {.loss_scale = loss_scale.defined() ? loss_scale.const_data_ptr<float>() : nullptr,
       .residual_scale = scale_.mutable_data_ptr<float>(),
       .gain = gain_.mutable_data_ptr<float>(),
       .stream = stream.native_handle()});
  if (!loss_scale.defined()) return;  // units never change then
  // Only the device knows whether the gain is 1.
  for (const at::Tensor& residual : {worker_tensor(), owner_tensor()}) {
    message_kernels().scale({.factor = gain_.const_data_ptr<float>(),
                             .values = residual.mutable_data_ptr<float>(),
                             .num_elements = static_cast<uint64_t>(residual.numel()),
                             .stream = stream.native_handle()});
  }
}

void DeviceResiduals::load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale) {
  Residuals::load(worker, owner);
  scale_.fill_(loss_scale);
}

void DeviceResiduals::add_to_worker(uint64_t offset, const at::Tensor& values, float factor,
                                    const at::Tensor& loss_scale) {
  const at::Tensor next = loss_scale.defined() ? loss_scale.reshape({1}) : at::ones_like(scale_);
  scale_.copy_(at::where(scale_ == 0, next, scale_));
  Residuals::add_to_worker(offset, values.to(at::kFloat) * (scale_ * factor));
}

float DeviceResiduals::loss_scale() const { return scale_.cpu().item<float>(); }

}  // namespace gradferry
