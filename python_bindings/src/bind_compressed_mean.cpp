#include <ATen/Functions.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings.h"
#include "gradferry/codec.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

// What the first step of an engine with one parameter makes of gradients[r] of rank r: encode,
// reduce and decode in one process, without messages, chunks or threads. Residuals are zero, as in
// a new engine. Benchmarks and tests compare engines with it, to the bit.
at::Tensor compressed_mean(const std::vector<at::Tensor>& gradients,
                           const std::string& codec_string, uint64_t seed, bool worker_residual,
                           bool owner_residual) {
  const py::gil_scoped_release released;
  GRADFERRY_EXPECTS(!gradients.empty(), kConfig, "compressed_mean takes one gradient per rank");
  const at::Tensor& first = gradients.front();
  for (const at::Tensor& gradient : gradients) {
    GRADFERRY_EXPECTS(
        gradient.device().is_cpu() && gradient.is_contiguous() &&
            gradient.numel() == first.numel() && gradient.scalar_type() == first.scalar_type(),
        kConfig, "compressed_mean takes contiguous CPU tensors of one size and dtype");
  }
  const ParsedCodec parsed = parse_codec(codec_string);
  const Codec& codec = *parsed.codec;
  const ScalarType dtype = to_scalar_type(first.scalar_type());
  const auto payload = [&](Stage stage) {
    return at::empty({codec.payload_bytes(kTileElements, dtype, stage, parsed.options)}, at::kByte);
  };
  const auto bytes = [](const at::Tensor& memory) {
    return static_cast<std::byte*>(memory.mutable_data_ptr());
  };
  std::vector<at::Tensor> sent;
  std::vector<const std::byte*> payloads;
  for (size_t rank = 0; rank < gradients.size(); ++rank) {
    payloads.push_back(bytes(sent.emplace_back(payload(Stage::kWorker))));
  }
  const at::Tensor reduced = payload(Stage::kOwner);
  const at::Tensor residual = at::empty({kTileElements}, at::kFloat);
  const auto new_residual = [&](bool wanted) {
    return wanted ? residual.zero_().mutable_data_ptr<float>() : nullptr;
  };
  at::Tensor mean = at::empty_like(first);

  const auto num_elements = static_cast<uint64_t>(first.numel());
  for (uint64_t begin = 0; begin < num_elements; begin += kTileElements) {
    const uint64_t count = std::min<uint64_t>(kTileElements, num_elements - begin);
    const Tile tile{begin / kTileElements, begin, 0, static_cast<uint32_t>(count), 0, 0, 0};
    TileBatch batch{.tiles = &tile,
                    .num_tiles = 1,
                    .dtype = dtype,
                    .stage = Stage::kWorker,
                    .hold_zero_tiles = true,
                    .seed = seed,
                    .step = 0,
                    .options = &parsed.options,
                    .status = nullptr};
    for (size_t rank = 0; rank < gradients.size(); ++rank) {
      codec.encode(batch, gradients[rank].const_data_ptr(), 1.0F, nullptr,
                   new_residual(worker_residual), bytes(sent[rank]));
    }
    batch.stage = Stage::kOwner;
    codec.reduce(batch, payloads.data(), static_cast<uint32_t>(payloads.size()), nullptr,
                 new_residual(owner_residual), bytes(reduced));
    codec.decode(batch, bytes(reduced), mean.mutable_data_ptr(), 0.0F, nullptr);
  }
  return mean;
}

}  // namespace

void bind_compressed_mean(py::module_& module) {
  module.def("compressed_mean", &compressed_mean, py::arg("gradients"), py::arg("codec"),
             py::kw_only(), py::arg("seed"), py::arg("worker_residual"), py::arg("owner_residual"));
}

}  // namespace gradferry
