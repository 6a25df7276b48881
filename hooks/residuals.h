// What compression has withheld so far on this rank: before the first exchange (worker residual)
// and before the second (owner residual). Flat fp32 buffers, addressed by the offsets that a Layout
// gives its tiles; a residual is never anything but finite.
//
// Residuals are in units of the gradients they were withheld from, that is, of a loss multiplied by
// `loss_scale`. Codecs multiply them by the gain that begin_pass() returns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "layout.h"

namespace gradferry {

// The parameter whose worker residual `values`, flat and on `device`, are to be added to. Throws
// Error(kConfig) when they do not fit, or there is none.
const Parameter& parameter_to_change(const Layout& layout, uint32_t index, const at::Tensor& values,
                                     c10::Device device);

// Elements of `updated` that are not finite leave the residual as it is.
void set_where_finite(const at::Tensor& residual, const at::Tensor& updated);

class Residuals {
 public:
  // `keep_copy`: take_back() will be called.
  Residuals(const Layout& layout, bool keep_copy, c10::Device device = c10::kCPU);

  float* worker() const { return worker_.mutable_data_ptr<float>(); }
  float* owner() const { return owner_.mutable_data_ptr<float>(); }
  const at::Tensor& worker_tensor() const { return worker_; }
  const at::Tensor& owner_tensor() const { return owner_; }
  // 0 before the first step: residuals that are zero have no units.
  float loss_scale() const { return loss_scale_; }
  uint64_t num_bytes() const;  // the copy included

  // Returns the factor that brings the residuals to the units of a pass with this loss scale.
  float begin_pass(float loss_scale);
  // take_back() will bring this moment back.
  void keep();
  void take_back();

  // Throws Error(kState) when sizes, dtype or device are not those of this layout.
  void load(const at::Tensor& worker, const at::Tensor& owner, float loss_scale);
  // worker[offset ..] += factor * values, where that is finite. `values` is unscaled; `loss_scale`
  // is that of the next step, and counts when there were no units yet.
  void add_to_worker(uint64_t offset, const at::Tensor& values, float factor, float loss_scale);
  // Multiplies both by `factor`. Like add_to_worker(), it changes what is kept as well.
  void scale(float factor);

 private:
  at::Tensor worker_;
  at::Tensor owner_;
  float loss_scale_ = 0.0F;
  at::Tensor worker_before_;  // without elements unless a copy is kept
  at::Tensor owner_before_;
  float loss_scale_before_ = 0.0F;
};

}  // namespace gradferry
