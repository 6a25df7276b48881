// The compression error of earlier steps on this rank: of what it sends in the scatter (worker
// residual) and in the gather (owner residual). Flat fp32 buffers, addressed by the offsets that a
// Layout gives its tiles. Residuals are always finite.
//
// Residuals are in units of the gradients they come from, that is, of a loss multiplied by a
// GradScaler's scale. The engines keep that scale beside them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "protocol/layout.h"

namespace gradferry {

// Returns parameter `index`. Throws Error(kConfig) unless it has a worker residual and `values` is
// flat, on `device`, and of the same number of elements.
const Parameter& parameter_to_change(const Layout& layout, uint32_t index, const at::Tensor& values,
                                     c10::Device device);

// The part of a parameter's `values` for whose elements this rank has a worker residual.
at::Tensor leaders_part(const Layout& layout, const Parameter& parameter, const at::Tensor& values);

// A copy of `residual` on the CPU: in `kept`, an earlier result that may be undefined, if that has
// as many elements, else in new memory, whose pages take longer than the copy.
at::Tensor copy_residual(const at::Tensor& residual, const at::Tensor& kept);

// Throws Error(kState) unless the tensors are on the CPU, fp32, of one dimension, and of the sizes
// of this rank's residuals; or both of no elements.
void expect_residuals_of(const Layout& layout, const at::Tensor& worker, const at::Tensor& owner);

class Residuals {
 public:
  // Has no elements.
  explicit Residuals(c10::Device device);
  Residuals(const Layout& layout, c10::Device device);

  float* worker() const { return worker_.mutable_data_ptr<float>(); }
  float* owner() const { return owner_.mutable_data_ptr<float>(); }
  const at::Tensor& worker_tensor() const { return worker_; }
  const at::Tensor& owner_tensor() const { return owner_; }
  uint64_t num_bytes() const { return worker_.nbytes() + owner_.nbytes(); }

  // These are work of the current stream.

  // Copies from tensors on the CPU of the same sizes; zeros where those have no elements.
  void load(const at::Tensor& worker, const at::Tensor& owner) const;
  // Multiplies residuals by the factor, except where that is not finite.
  void scale(float factor) const;
  // Multiplies the residuals of every parameter by its factor, from 0 to 1.
  void scale_by_parameter(const Layout& layout, const std::vector<float>& factors) const;
  // worker[offset ..] += change, except where that is not finite.
  void add_to_worker(uint64_t offset, const at::Tensor& change) const;

 private:
  at::Tensor worker_;
  at::Tensor owner_;
};

}  // namespace gradferry
