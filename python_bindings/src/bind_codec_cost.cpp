#include "bindings.h"
#include "measure/codec_cost.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

py::dict cost_of(const std::string& codec, at::ScalarType dtype, uint32_t world_size,
                 bool worker_residual, bool owner_residual, bool momentum, size_t num_elements,
                 int rounds) {
  const CodecCost cost = [&] {
    const py::gil_scoped_release released;
    return codec_cost({.codec = codec,
                       .dtype = to_scalar_type(dtype),
                       .world_size = world_size,
                       .worker_residual = worker_residual,
                       .owner_residual = owner_residual,
                       .momentum = momentum,
                       .num_elements = num_elements,
                       .rounds = rounds});
  }();
  return py::dict(py::arg("encode_per_element") = cost.encode_per_element,
                  py::arg("reduce_per_element") = cost.reduce_per_element,
                  py::arg("decode_per_element") = cost.decode_per_element,
                  py::arg("check_per_byte") = cost.check_per_byte);
}

}  // namespace

void bind_codec_cost(py::module_& module) {
  module.def("codec_cost", &cost_of, py::arg("codec"), py::kw_only(), py::arg("dtype"),
             py::arg("world_size"), py::arg("worker_residual"), py::arg("owner_residual"),
             py::arg("momentum"), py::arg("num_elements"), py::arg("rounds"));
}

}  // namespace gradferry
