#include "residuals.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "gradferry/error.h"

namespace gradferry {
namespace {

at::Tensor zeros(uint64_t num_elements, c10::Device device) {
  return at::zeros({static_cast<int64_t>(num_elements)},
                   at::TensorOptions().dtype(at::kFloat).device(device));
}

}  // namespace

void set_where_finite(const at::Tensor& residual, const at::Tensor& updated) {
  residual.copy_(at::where(at::isfinite(updated), updated, residual));
}

const Parameter& parameter_to_change(const Layout& layout, uint32_t index, const at::Tensor& values,
                                     c10::Device device) {
  GRADFERRY_EXPECTS(index < layout.parameters().size(), kConfig,
                    "there is no parameter " + std::to_string(index));
  const Parameter& target = layout.parameters()[index];
  const bool fits = static_cast<uint64_t>(values.numel()) == target.num_elements &&
                    values.dim() == 1 && values.device() == device;
  GRADFERRY_EXPECTS(fits && target.worker_residual != kNoResidual, kConfig,
                    "the values for '" + target.name + "' must be a tensor of one dimension, " +
                        std::to_string(target.num_elements) + " elements, on " + device.str() +
                        ", and the parameter must have a worker residual");
  return target;
}

Residuals::Residuals(const Layout& layout, bool keep_copy, c10::Device device)
    : worker_(zeros(layout.worker_residual_elements(), device)),
      owner_(zeros(layout.owner_residual_elements(), device)),
      worker_before_(zeros(keep_copy ? worker_.numel() : 0, device)),
      owner_before_(zeros(keep_copy ? owner_.numel() : 0, device)) {}

uint64_t Residuals::num_bytes() const {
  return worker_.nbytes() + owner_.nbytes() + worker_before_.nbytes() + owner_before_.nbytes();
}

void Residuals::keep() {
  if (worker_before_.numel() != 0) worker_before_.copy_(worker_);
  if (owner_before_.numel() != 0) owner_before_.copy_(owner_);
  loss_scale_before_ = loss_scale_;
}

float Residuals::begin_pass(float loss_scale) {
  const float gain = loss_scale_ == 0.0F ? 1.0F : loss_scale / loss_scale_;
  loss_scale_ = loss_scale;
  return gain;
}

void Residuals::take_back() {
  if (worker_before_.numel() != 0) worker_.copy_(worker_before_);
  if (owner_before_.numel() != 0) owner_.copy_(owner_before_);
  loss_scale_ = loss_scale_before_;
}

void Residuals::load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale) {
  const auto fits = [](const at::Tensor& own, const at::Tensor& other) {
    return other.device().is_cpu() && other.scalar_type() == at::kFloat &&
           other.sizes() == own.sizes();
  };
  GRADFERRY_EXPECTS(fits(worker_, worker) && fits(owner_, owner), kState,
                    "the saved residuals have another size, dtype or device than this engine's; "
                    "they belong to another model, codec, rank or world size");
  worker_.copy_(worker);
  owner_.copy_(owner);
  loss_scale_ = loss_scale;
}

void Residuals::add_to_worker(uint64_t offset, const at::Tensor& values, float factor,
                              float loss_scale) {
  const auto add = [&](const at::Tensor& worker, float& units) {
    if (units == 0.0F) units = loss_scale;
    at::Tensor part = worker.narrow(0, static_cast<int64_t>(offset), values.numel());
    set_where_finite(part, part + values.to(at::kFloat) * (factor * units));
  };
  add(worker_, loss_scale_);
  if (worker_before_.numel() != 0) add(worker_before_, loss_scale_before_);
}

void Residuals::scale(float factor) {
  for (const at::Tensor& residual : {worker_, owner_, worker_before_, owner_before_}) {
    set_where_finite(residual, residual * factor);
  }
}

}  // namespace gradferry
