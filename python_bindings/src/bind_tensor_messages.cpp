#include <ATen/Dispatch.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "bindings.h"
#include "protocol/tensor_message.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

using Bytes = std::span<const std::byte>;

TensorMessages messages_of(const at::Tensor& tensor, const TensorMessageOptions& options) {
  GRADFERRY_EXPECTS(tensor.device().is_cpu(), kConfig,
                    "tensor is on " + tensor.device().str() + "; move it to the CPU");
  GRADFERRY_EXPECTS(tensor.is_contiguous(), kConfig,
                    "tensor is not contiguous; call .contiguous() first");
  return {options, to_scalar_type(tensor.scalar_type()), static_cast<uint64_t>(tensor.numel())};
}

// `name` of the message is for errors.
Bytes bytes_of(const at::Tensor& message, const std::string& name) {
  GRADFERRY_EXPECTS(message.device().is_cpu() && message.scalar_type() == at::kByte &&
                        message.dim() == 1 && message.is_contiguous(),
                    kConfig,
                    name +
                        " must be a contiguous one-dimensional uint8 tensor on the CPU, as "
                        "encode() returns it");
  return {static_cast<const std::byte*>(message.const_data_ptr()), message.nbytes()};
}

// Not at::copy_, which writes another NaN.
template <typename T>
void round_to(std::span<const float> numbers, void* rounded) {
  std::ranges::copy(numbers, static_cast<T*>(rounded));
}

TensorMessages::Round round_of(const at::Tensor& out) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, out.scalar_type(), "accumulate",
                                         [] { return &round_to<scalar_t>; });
}

at::Tensor encode_tensor(const at::Tensor& tensor, const TensorMessageOptions& options,
                         uint64_t seed, uint64_t step) {
  const TensorMessages messages = messages_of(tensor, options);
  at::Tensor message = at::zeros({static_cast<int64_t>(messages.message_bytes())},
                                 at::TensorOptions().dtype(at::kByte));
  messages.encode(tensor.const_data_ptr(), seed, step,
                  static_cast<std::byte*>(message.mutable_data_ptr()));
  return message;
}

void decode_tensor(const at::Tensor& message, const TensorMessageOptions& options,
                   const at::Tensor& out) {
  messages_of(out, options).decode(bytes_of(message, "message"), out.mutable_data_ptr());
}

void accumulate_tensors(const std::vector<at::Tensor>& messages,
                        const TensorMessageOptions& options, uint32_t divisor,
                        const at::Tensor& out) {
  std::vector<Bytes> bytes;
  for (size_t i = 0; i < messages.size(); ++i) {
    bytes.push_back(bytes_of(messages[i], "message " + std::to_string(i)));
  }
  messages_of(out, options).accumulate(bytes, divisor, round_of(out), out.mutable_data_ptr());
}

}  // namespace

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
