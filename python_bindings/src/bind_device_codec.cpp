// One codec's kernels on a device, for benchmarks: each call is one launch on the current stream,
// for one parameter. An engine's launches do the same to a chunk and write headers, too.
#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "bindings.h"
#include "gradferry/codec.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

class DeviceCodec {
 public:
  DeviceCodec(const std::string& codec, at::ScalarType dtype, uint64_t num_elements,
              c10::Device device)
      : codec_(parse_codec(codec, Device::kCuda)),
        dtype_(to_scalar_type(dtype)),
        num_elements_(num_elements),
        device_(device) {
    GRADFERRY_EXPECTS(num_elements >= 1, kConfig, "a codec takes at least one element, not 0");
    std::vector<Tile> sent, gathered;
    for (uint64_t first = 0; first < num_elements; first += kTileElements) {
      const auto n = static_cast<uint32_t>(std::min<uint64_t>(kTileElements, num_elements - first));
      const auto worker = static_cast<uint32_t>(worker_bytes_);
      const auto owner = static_cast<uint32_t>(owner_bytes_);
      const uint64_t id = first / kTileElements;
      sent.push_back({id, first, first, n, worker, owner, 0});
      gathered.push_back({id, first, first, n, owner, 0, 0});
      worker_bytes_ += codec_.codec->payload_bytes(n, dtype_, Stage::kWorker, codec_.options);
      owner_bytes_ += codec_.codec->payload_bytes(n, dtype_, Stage::kOwner, codec_.options);
      GRADFERRY_EXPECTS(
          worker_bytes_ <= UINT32_MAX && owner_bytes_ <= UINT32_MAX, kConfig,
          "payloads of " + std::to_string(num_elements) + " elements exceed 4 GiB; take fewer");
    }
    num_tiles_ = static_cast<uint32_t>(sent.size());
    sent_ = upload(sent.data(), sent.size() * sizeof(Tile));
    gathered_ = upload(gathered.data(), gathered.size() * sizeof(Tile));
    status_ = upload(nullptr, num_tiles_ * sizeof(TileStatus));
  }

  uint64_t worker_bytes() const { return worker_bytes_; }
  uint64_t owner_bytes() const { return owner_bytes_; }

  void encode(const at::Tensor& gradient, const std::optional<at::Tensor>& residual,
              const at::Tensor& out) const {
    expect_gradient(gradient);
    expect_bytes(out, worker_bytes_, "out");
    codec_.codec->encode(batch(sent_, Stage::kWorker), gradient.const_data_ptr(), 1.0F, nullptr,
                         residual_of(residual), bytes(out));
  }

  void decode(const at::Tensor& payload, const at::Tensor& gradient) const {
    expect_gradient(gradient);
    expect_bytes(payload, owner_bytes_, "payload");
    codec_.codec->decode(batch(gathered_, Stage::kOwner), bytes(payload),
                         gradient.mutable_data_ptr(), 0.0F, nullptr);
  }

  // Where payloads lie, for reduce.
  at::Tensor pointers(const std::vector<at::Tensor>& payloads) const {
    std::vector<const std::byte*> table;
    for (const at::Tensor& payload : payloads) {
      expect_bytes(payload, worker_bytes_, "payload");
      table.push_back(bytes(payload));
    }
    return upload(static_cast<const void*>(table.data()), table.size() * sizeof(const std::byte*));
  }

  void reduce(const at::Tensor& pointers, const std::optional<at::Tensor>& residual,
              const at::Tensor& out) const {
    expect_bytes(out, owner_bytes_, "out");
    const auto world_size = static_cast<uint32_t>(pointers.nbytes() / sizeof(const std::byte*));
    codec_.codec->reduce(batch(sent_, Stage::kWorker),
                         static_cast<const std::byte* const*>(pointers.const_data_ptr()),
                         world_size, nullptr, residual_of(residual), bytes(out));
  }

 private:
  static std::byte* bytes(const at::Tensor& tensor) {
    return static_cast<std::byte*>(tensor.mutable_data_ptr());
  }
  // `data` null: zeros.
  at::Tensor upload(const void* data, uint64_t num_bytes) const {
    at::Tensor host =
        at::zeros({static_cast<int64_t>(num_bytes)}, at::TensorOptions().dtype(at::kByte));
    if (data != nullptr) std::memcpy(host.mutable_data_ptr(), data, num_bytes);
    return host.to(device_);
  }
  TileBatch batch(const at::Tensor& tiles, Stage stage) const {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    return {.tiles = static_cast<const Tile*>(tiles.const_data_ptr()),
            .num_tiles = num_tiles_,
            .dtype = dtype_,
            .stage = stage,
            .hold_zero_tiles = true,
            .seed = 0,
            .step = 0,
            .options = &codec_.options,
            .status = static_cast<TileStatus*>(status_.mutable_data_ptr()),
            .stream = stream.native_handle()};
  }
  void expect_gradient(const at::Tensor& gradient) const {
    GRADFERRY_EXPECTS(gradient.device() == device_ && gradient.is_contiguous() &&
                          static_cast<uint64_t>(gradient.numel()) == num_elements_ &&
                          to_scalar_type(gradient.scalar_type()) == dtype_,
                      kConfig,
                      "gradient must be contiguous, of the codec's dtype, on " + device_.str() +
                          ", with " + std::to_string(num_elements_) + " elements");
  }
  void expect_bytes(const at::Tensor& tensor, uint64_t num_bytes, const char* what) const {
    GRADFERRY_EXPECTS(tensor.device() == device_ && tensor.is_contiguous() &&
                          tensor.nbytes() == num_bytes &&
                          reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0,
                      kConfig,
                      std::string(what) + " must be contiguous, aligned to 16 bytes, on " +
                          device_.str() + ", with " + std::to_string(num_bytes) + " bytes");
  }
  float* residual_of(const std::optional<at::Tensor>& residual) const {
    if (!residual) return nullptr;
    expect_bytes(*residual, num_elements_ * sizeof(float), "residual");
    return residual->mutable_data_ptr<float>();
  }

  const ParsedCodec codec_;
  const ScalarType dtype_;
  const uint64_t num_elements_;
  const c10::Device device_;
  uint32_t num_tiles_ = 0;
  uint64_t worker_bytes_ = 0, owner_bytes_ = 0;
  at::Tensor sent_, gathered_, status_;
};

}  // namespace

void bind_device_codec(py::module_& module) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<DeviceCodec>(module, "DeviceCodec")
      .def(py::init<const std::string&, at::ScalarType, uint64_t, c10::Device>(), py::kw_only(),
           py::arg("codec"), py::arg("dtype"), py::arg("num_elements"), py::arg("device"), released)
      .def_property_readonly("worker_bytes", &DeviceCodec::worker_bytes)
      .def_property_readonly("owner_bytes", &DeviceCodec::owner_bytes)
      .def("encode", &DeviceCodec::encode, py::arg("gradient"), py::arg("residual").none(true),
           py::arg("out"), released)
      .def("decode", &DeviceCodec::decode, py::arg("payload"), py::arg("gradient"), released)
      .def("pointers", &DeviceCodec::pointers, py::arg("payloads"), released)
      .def("reduce", &DeviceCodec::reduce, py::arg("pointers"), py::arg("residual").none(true),
           py::arg("out"), released);
}

}  // namespace gradferry
