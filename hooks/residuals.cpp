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

// residual = updated, except where `updated` is not finite.
void set_where_finite(const at::Tensor& residual, const at::Tensor& updated) {
  residual.copy_(at::where(at::isfinite(updated), updated, residual));
}

}  // namespace

const Parameter& parameter_to_change(const Layout& layout, uint32_t index, const at::Tensor& values,
                                     c10::Device device) {
  GRADFERRY_EXPECTS(index < layout.parameters().size(), kConfig,
                    "there is no parameter " + std::to_string(index));
  const Parameter& target = layout.parameters()[index];
  const bool fits = static_cast<uint64_t>(values.numel()) == target.num_elements &&
                    values.dim() == 1 && values.device() == device;
  GRADFERRY_EXPECTS(fits && target.worker_residual, kConfig,
                    "the values for '" + target.name + "' must be a tensor of one dimension, " +
                        std::to_string(target.num_elements) + " elements, on " + device.str() +
                        ", and the parameter must have a worker residual");
  return target;
}

at::Tensor leaders_part(const Layout& layout, const Parameter& parameter,
                        const at::Tensor& values) {
  std::vector<at::Tensor> parts;
  for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
    if (layout.worker_residual_offset(parameter.first_tile + t) == kNoResidual) continue;
    parts.push_back(
        values.narrow(0, int64_t{t} * kTileElements, layout.tile_elements(parameter, t)));
  }
  return parts.size() == parameter.num_tiles ? values : at::cat(parts);
}

at::Tensor copy_residual(const at::Tensor& residual, const at::Tensor& kept) {
  const bool fits = kept.defined() && kept.is_cpu() && kept.is_contiguous() &&
                    !kept.is_inference() && kept.scalar_type() == residual.scalar_type() &&
                    kept.sizes() == residual.sizes();
  const at::Tensor copy = fits ? kept : at::empty(residual.sizes(), at::TensorOptions(at::kFloat));
  copy.copy_(residual);
  return copy;
}

void expect_residuals_of(const Layout& layout, const at::Tensor& worker, const at::Tensor& owner) {
  const bool nothing = worker.numel() == 0 && owner.numel() == 0;
  const auto fits = [&](const at::Tensor& residual, uint64_t num_elements) {
    return residual.device().is_cpu() && residual.scalar_type() == at::kFloat &&
           residual.dim() == 1 &&
           (nothing || static_cast<uint64_t>(residual.numel()) == num_elements);
  };
  GRADFERRY_EXPECTS(fits(worker, layout.worker_residual_elements()) &&
                        fits(owner, layout.owner_residual_elements()),
                    kState,
                    "the saved residuals have another size, dtype or device than this engine's; "
                    "they belong to another model, codec, rank or world size");
}

Residuals::Residuals(c10::Device device) : worker_(zeros(0, device)), owner_(zeros(0, device)) {}

Residuals::Residuals(const Layout& layout, c10::Device device)
    : worker_(zeros(layout.worker_residual_elements(), device)),
      owner_(zeros(layout.owner_residual_elements(), device)) {}

void Residuals::load(const at::Tensor& worker, const at::Tensor& owner) const {
  const auto load = [](const at::Tensor& here, const at::Tensor& saved) {
    saved.numel() == 0 ? here.zero_() : here.copy_(saved);
  };
  load(worker_, worker);
  load(owner_, owner);
}

void Residuals::scale(float factor) const {
  constexpr int64_t kAtOnce = int64_t{1} << 20;  // elements, for a few bytes each beside them
  for (const at::Tensor& residual : {worker_, owner_}) {
    for (const at::Tensor& part : residual.split(kAtOnce)) set_where_finite(part, part * factor);
  }
}

void Residuals::scale_by_parameter(const Layout& layout, const std::vector<float>& factors) const {
  const auto multiply = [](const at::Tensor& residual, ResidualRange range, float factor) {
    if (range.begin == range.end || factor == 1.0F) return;
    residual
        .narrow(0, static_cast<int64_t>(range.begin), static_cast<int64_t>(range.end - range.begin))
        .mul_(factor);
  };
  for (size_t i = 0; i < factors.size(); ++i) {
    const Parameter& parameter = layout.parameters()[i];
    multiply(worker_, layout.worker_residual_range(parameter), factors[i]);
    multiply(owner_, layout.owner_residual_range(parameter), factors[i]);
  }
}

void Residuals::add_to_worker(uint64_t offset, const at::Tensor& change) const {
  const at::Tensor part = worker_.narrow(0, static_cast<int64_t>(offset), change.numel());
  set_where_finite(part, part + change);
}

}  // namespace gradferry
