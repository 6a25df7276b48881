#include "bindings.h"
#include "tensor_message.h"

namespace gradferry {

void bind_tensor_messages(py::module_& module) {
  module.def(
      "encode_tensor",
      [](const at::Tensor& tensor, const std::string& codec, uint64_t seed, uint64_t step,
         uint64_t config_hash, uint64_t layout_hash) {
        const py::gil_scoped_release released;
        return encode_tensor(tensor, {codec, config_hash, layout_hash}, seed, step);
      },
      py::arg("tensor"), py::arg("codec"), py::kw_only(), py::arg("seed"), py::arg("step"),
      py::arg("config_hash"), py::arg("layout_hash"));
  module.def(
      "decode_tensor",
      [](const at::Tensor& message, const std::string& codec, const at::Tensor& out,
         uint64_t config_hash, uint64_t layout_hash) {
        const py::gil_scoped_release released;
        decode_tensor(message, {codec, config_hash, layout_hash}, out);
      },
      py::arg("message"), py::arg("codec"), py::arg("out"), py::kw_only(), py::arg("config_hash"),
      py::arg("layout_hash"));
  module.def(
      "accumulate_tensors",
      [](const std::vector<at::Tensor>& messages, const std::string& codec, const at::Tensor& out,
         uint32_t divisor, uint64_t config_hash, uint64_t layout_hash) {
        const py::gil_scoped_release released;
        accumulate_tensors(messages, {codec, config_hash, layout_hash}, divisor, out);
      },
      py::arg("messages"), py::arg("codec"), py::arg("out"), py::kw_only(), py::arg("divisor"),
      py::arg("config_hash"), py::arg("layout_hash"));
}

}  // namespace gradferry
