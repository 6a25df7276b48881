#include <ATen/Functions.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "measure/compressed_mean.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

at::Tensor mean_of(const std::vector<at::Tensor>& gradients, const std::string& codec,
                   uint64_t seed, bool worker_residual, bool owner_residual) {
  const py::gil_scoped_release released;
  GRADFERRY_EXPECTS(!gradients.empty(), kConfig, "compressed_mean takes one gradient per rank");
  const at::Tensor& first = gradients.front();
  std::vector<const void*> data;
  for (const at::Tensor& gradient : gradients) {
    GRADFERRY_EXPECTS(
        gradient.device().is_cpu() && gradient.is_contiguous() &&
            gradient.numel() == first.numel() && gradient.scalar_type() == first.scalar_type(),
        kConfig, "compressed_mean takes contiguous CPU tensors of one size and dtype");
    data.push_back(gradient.const_data_ptr());
  }
  at::Tensor mean = at::empty_like(first);
  compressed_mean({.codec = codec,
                   .dtype = to_scalar_type(first.scalar_type()),
                   .num_elements = static_cast<size_t>(first.numel()),
                   .seed = seed,
                   .worker_residual = worker_residual,
                   .owner_residual = owner_residual},
                  data, mean.mutable_data_ptr());
  return mean;
}

}  // namespace

void bind_compressed_mean(py::module_& module) {
  module.def("compressed_mean", &mean_of, py::arg("gradients"), py::arg("codec"), py::kw_only(),
             py::arg("seed"), py::arg("worker_residual"), py::arg("owner_residual"));
}

}  // namespace gradferry
