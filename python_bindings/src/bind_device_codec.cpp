// One codec on a device as an engine there uses it, for measurements: the kernels of chunks, for a
// chunk that holds one parameter. Each call is one launch on the current stream.
#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "gradferry/device_library.h"
#include "lane.h"
#include "protocol/faults.h"
#include "protocol/messages.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

// In the order of the tables of tiles in device memory.
enum class KernelCall : uint8_t { kEncode, kReduce, kDecode };

// This rank is rank 0 and owns all tiles: it sends one message, and reduces what every rank sends.
constexpr Envelope kEnvelope{
    .config_hash = 0, .layout_hash = 0, .step = 0, .chunk = 0, .rank = 0, .phase = Phase::kScatter};

// Holds the messages and tables of the chunk. Gradients have num_elements elements, residuals too,
// in fp32; without a residual the compression error is lost.
class DeviceCodec {
 public:
  // `world_size`: the most messages that are reduced. `momentum`: one of 0.5, else none. Throws
  // Error(kConfig) for a codec or size that cannot be.
  DeviceCodec(const std::string& codec, at::ScalarType dtype, uint64_t num_elements,
              c10::Device device, uint32_t world_size, bool momentum)
      : codec_(parse_codec(codec)),
        dtype_(to_scalar_type(dtype)),
        num_elements_(num_elements),
        device_(device),
        world_size_(world_size),
        momentum_(momentum) {
    GRADFERRY_EXPECTS(num_elements >= 1 && num_elements <= UINT32_MAX, kConfig,
                      "num_elements must be 1 to 4294967295, not " + std::to_string(num_elements));
    GRADFERRY_EXPECTS(world_size >= 1, kConfig, "a world has at least one rank, not 0");
    num_tiles_ = (num_elements + kTileElements - 1) / kTileElements;
    worker_bytes_ = payload_bytes(Stage::kWorker);
    owner_bytes_ = payload_bytes(Stage::kOwner);
    GRADFERRY_EXPECTS(world_size <= UINT32_MAX / (kHeaderBytes + worker_bytes_) &&
                          kHeaderBytes + owner_bytes_ <= UINT32_MAX,
                      kConfig,
                      "messages of " + std::to_string(num_elements) + " elements from " +
                          std::to_string(world_size) + " ranks exceed 4 GiB; take fewer of either");
    upload_tiles();
    make_messages();
    const float alpha = momentum ? 0.5F : 1.0F, beta = momentum ? 0.5F : 0.0F;
    const ChunkCodec used{row_of(*codec_.codec), alpha, beta, codec_.options};
    const float gain = 1.0F;  // an engine always has one
    chunk_codec_ = upload(&used, sizeof(used));
    gain_ = upload(&gain, sizeof(gain));
    progress_ = zeros(sizeof(ChunkProgress) + (uint64_t{world_size} + 1) * sizeof(uint64_t));
    verdicts_ = zeros(uint64_t{world_size} * sizeof(uint32_t));
    flags_ = zeros(num_tiles_ * sizeof(uint32_t));
    findings_ = zeros(sizeof(Findings));
  }

  uint64_t worker_bytes() const { return worker_bytes_; }
  uint64_t owner_bytes() const { return owner_bytes_; }
  // Messages, as bytes on the device: what encode writes, what every rank sent, in rank order, and
  // what reduce writes and decode reads.
  const at::Tensor& sent() const { return sent_; }
  const at::Tensor& received() const { return received_; }
  const at::Tensor& reduced() const { return reduced_; }

  void encode(const at::Tensor& gradient, const std::optional<at::Tensor>& residual) const {
    expect_gradient(gradient);
    chunk_kernels().encode({.chunk = chunk(KernelCall::kEncode, residual),
                            .gradient = gradient.const_data_ptr(),
                            .gain = gain(),
                            .residual = residual_of(residual),
                            .messages = sent_message(),
                            .num_messages = 1,
                            .out = bytes(sent_)});
  }

  // What was sent becomes what `rank` sent: the same payload, the header of that rank.
  void receive(uint32_t rank) const {
    GRADFERRY_EXPECTS(
        rank < world_size_, kConfig,
        "rank must be below " + std::to_string(world_size_) + ", not " + std::to_string(rank));
    const int64_t size = sent_.numel();
    const at::Tensor place = received_.narrow(0, rank * size, size);
    place.copy_(sent_);
    constexpr auto kOffset = static_cast<int64_t>(offsetof(MessageHeader, source_rank));
    constexpr auto kBytes = static_cast<int64_t>(sizeof(MessageHeader::source_rank));
    place.narrow(0, kOffset, kBytes).copy_(ranks_.narrow(0, rank * kBytes, kBytes));
  }

  // Reduces the messages of the first `world_size` ranks, each of which must have been received.
  void reduce(const std::optional<at::Tensor>& residual, uint32_t world_size) const {
    GRADFERRY_EXPECTS(world_size >= 1 && world_size <= world_size_, kConfig,
                      "world_size must be 1 to " + std::to_string(world_size_) + ", not " +
                          std::to_string(world_size));
    chunk_kernels().reduce({.chunk = chunk(KernelCall::kReduce, residual),
                            .received = {.messages = received_messages(),
                                         .num_messages = world_size,
                                         .buffer = bytes(received_),
                                         .verdicts = verdicts()},
                            .gain = gain(),
                            .residual = residual_of(residual),
                            .payload_bytes = static_cast<uint32_t>(owner_bytes_),
                            .out = bytes(reduced_),
                            .findings = findings(),
                            .from_siblings = {},
                            .forward_payload_bytes = 0,
                            .forward = nullptr});
  }

  void decode(const at::Tensor& gradient, const std::optional<at::Tensor>& residual) const {
    expect_gradient(gradient);
    chunk_kernels().decode({.chunk = chunk(KernelCall::kDecode, residual),
                            .received = {.messages = reduced_message(),
                                         .num_messages = 1,
                                         .buffer = bytes(reduced_),
                                         .verdicts = verdicts()},
                            .sent = bytes(sent_),
                            .gradient = gradient.mutable_data_ptr(),
                            .residual = residual_of(residual),
                            .flags = flags(),
                            .findings = findings()});
  }

  // Throws what a kernel has found wrong so far: Error(kProtocol) for a message that it rejected,
  // Error(kConfig) for a number that is not finite. Either takes another path through the kernels.
  // Waits for the device.
  void expect_no_findings() const {
    const at::Tensor host = findings_.cpu();
    Findings found;
    std::memcpy(&found, host.const_data_ptr(), sizeof(found));
    const Fault fault{.status = static_cast<WireStatus>(found.status),
                      .phase = static_cast<Phase>(found.phase),
                      .rank = found.rank,
                      .chunk = found.chunk,
                      .expected = found.expected,
                      .received = found.received};
    if (fault) throw Error(ErrorKind::kProtocol, describe({fault, kEnvelope.rank, found.step}));
    GRADFERRY_EXPECTS(found.nonfinite_tile == 0, kConfig,
                      "tile " + std::to_string(found.nonfinite_tile - 1) +
                          " was decoded to a number that is not finite; encode finite gradients");
  }

 private:
  // --- memory

  at::Tensor zeros(uint64_t num_bytes) const {
    return at::zeros({static_cast<int64_t>(num_bytes)},
                     at::TensorOptions().dtype(at::kByte).device(device_));
  }
  // `data`: in host memory. Waits for the copy.
  at::Tensor upload(const void* data, uint64_t num_bytes) const {
    const at::Tensor host = at::empty({static_cast<int64_t>(num_bytes)}, at::kByte);
    std::memcpy(host.mutable_data_ptr(), data, num_bytes);
    return host.to(device_);
  }

  uint32_t tile_bytes(uint64_t count, Stage stage) const {
    return codec_.codec->payload_bytes(static_cast<uint32_t>(count), dtype_, stage, codec_.options);
  }
  uint64_t payload_bytes(Stage stage) const {
    const uint64_t whole = num_tiles_ - 1;
    return whole * tile_bytes(kTileElements, stage) +
           tile_bytes(num_elements_ - whole * kTileElements, stage);
  }

  // The tiles of every call, first without residual, then with. Offsets are those that
  // device_library.h wants for the call.
  void upload_tiles() {
    std::vector<ChunkTile> tables(6 * num_tiles_);
    for (uint64_t id = 0; id < num_tiles_; ++id) {
      const uint64_t first = id * kTileElements;
      const auto n =
          static_cast<uint32_t>(std::min<uint64_t>(kTileElements, num_elements_ - first));
      const auto worker = static_cast<uint32_t>(id * tile_bytes(kTileElements, Stage::kWorker));
      const auto owner = static_cast<uint32_t>(id * tile_bytes(kTileElements, Stage::kOwner));
      const auto put = [&](KernelCall call, uint32_t payload, uint32_t output,
                           uint32_t in_message) {
        for (const bool kept : {false, true}) {
          tables[table_of(call, kept) + id] = {
              {id, first, first, n, payload, output, in_message}, 0, 0, kept ? 1U : 0U, 0};
        }
      };
      put(KernelCall::kEncode, kHeaderBytes + worker, 0, worker);
      put(KernelCall::kReduce, worker, owner, owner);
      put(KernelCall::kDecode, kHeaderBytes + owner, kHeaderBytes + worker, owner);
    }
    tiles_ = upload(static_cast<const void*>(tables.data()), tables.size() * sizeof(ChunkTile));
  }
  uint64_t table_of(KernelCall call, bool has_residual) const {
    return (2 * static_cast<uint64_t>(call) + (has_residual ? 1 : 0)) * num_tiles_;
  }

  void make_messages() {
    const auto worker = static_cast<uint32_t>(worker_bytes_);
    const auto owner = static_cast<uint32_t>(owner_bytes_);
    std::vector<Message> messages;
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      messages.push_back({rank * (kHeaderBytes + worker), worker, rank, Phase::kScatter, 0});
      ranks.push_back(rank);
    }
    messages.push_back({0, owner, 0, Phase::kGather, 0});
    messages_ = upload(messages.data(), messages.size() * sizeof(Message));
    ranks_ = upload(ranks.data(), ranks.size() * sizeof(uint32_t));
    sent_ = zeros(kHeaderBytes + worker_bytes_);
    received_ = zeros(world_size_ * (kHeaderBytes + worker_bytes_));
    reduced_ = zeros(kHeaderBytes + owner_bytes_);
  }

  // --- parts of calls

  ChunkBatch chunk(KernelCall call, const std::optional<at::Tensor>& residual) const {
    const auto* tiles = static_cast<const ChunkTile*>(tiles_.const_data_ptr());
    const auto* codecs = static_cast<const ChunkCodec*>(chunk_codec_.const_data_ptr());
    return {
        .tiles = tiles + table_of(call, residual.has_value()),
        .num_tiles = static_cast<uint32_t>(num_tiles_),
        .codecs = codecs,
        .rows = 1U << row_of(*codec_.codec),
        .dtype = dtype_,
        .hold_zero_tiles = !momentum_,
        .seed = 0,
        .envelope = kEnvelope,
        .progress = static_cast<ChunkProgress*>(progress_.mutable_data_ptr()),
        .stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle()};
  }
  const Message* received_messages() const {
    return static_cast<const Message*>(messages_.const_data_ptr());
  }
  const Message* sent_message() const { return received_messages(); }  // lies as rank 0's
  const Message* reduced_message() const { return received_messages() + world_size_; }
  const float* gain() const { return static_cast<const float*>(gain_.const_data_ptr()); }
  uint32_t* verdicts() const { return static_cast<uint32_t*>(verdicts_.mutable_data_ptr()); }
  uint32_t* flags() const { return static_cast<uint32_t*>(flags_.mutable_data_ptr()); }
  Findings* findings() const { return static_cast<Findings*>(findings_.mutable_data_ptr()); }

  void expect_gradient(const at::Tensor& gradient) const {
    GRADFERRY_EXPECTS(gradient.device() == device_ && gradient.is_contiguous() &&
                          static_cast<uint64_t>(gradient.numel()) == num_elements_ &&
                          to_scalar_type(gradient.scalar_type()) == dtype_,
                      kConfig,
                      "gradient must be contiguous, of the right dtype, on " + device_.str() +
                          ", with " + std::to_string(num_elements_) + " elements");
  }
  float* residual_of(const std::optional<at::Tensor>& residual) const {
    if (!residual) return nullptr;
    GRADFERRY_EXPECTS(residual->device() == device_ && residual->is_contiguous() &&
                          residual->scalar_type() == at::kFloat &&
                          static_cast<uint64_t>(residual->numel()) == num_elements_ &&
                          reinterpret_cast<uintptr_t>(residual->const_data_ptr()) % 16 == 0,
                      kConfig,
                      "residual must be contiguous float32, aligned to 16 bytes, on " +
                          device_.str() + ", with " + std::to_string(num_elements_) + " elements");
    return residual->mutable_data_ptr<float>();
  }

  const ParsedCodec codec_;
  const ScalarType dtype_;
  const uint64_t num_elements_;
  const c10::Device device_;
  const uint32_t world_size_;
  const bool momentum_;
  uint64_t num_tiles_ = 0, worker_bytes_ = 0, owner_bytes_ = 0;
  // On the device, as bytes.
  at::Tensor tiles_, chunk_codec_, messages_, ranks_, gain_;  // tables
  at::Tensor sent_, received_, reduced_;                      // messages
  at::Tensor progress_, verdicts_, flags_, findings_;         // what the kernels write besides
};

}  // namespace

void bind_device_codec(py::module_& module) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<DeviceCodec>(module, "DeviceCodec")
      .def(py::init<const std::string&, at::ScalarType, uint64_t, c10::Device, uint32_t, bool>(),
           py::kw_only(), py::arg("codec"), py::arg("dtype"), py::arg("num_elements"),
           py::arg("device"), py::arg("world_size") = 1, py::arg("momentum") = false, released)
      .def_property_readonly("worker_bytes", &DeviceCodec::worker_bytes)
      .def_property_readonly("owner_bytes", &DeviceCodec::owner_bytes)
      .def_property_readonly("sent", &DeviceCodec::sent)
      .def_property_readonly("received", &DeviceCodec::received)
      .def_property_readonly("reduced", &DeviceCodec::reduced)
      .def("encode", &DeviceCodec::encode, py::arg("gradient"), py::arg("residual").none(true),
           released)
      .def("receive", &DeviceCodec::receive, py::arg("rank"), released)
      .def("reduce", &DeviceCodec::reduce, py::arg("residual").none(true), py::arg("world_size"),
           released)
      .def("decode", &DeviceCodec::decode, py::arg("gradient"), py::arg("residual").none(true),
           released)
      .def("expect_no_findings", &DeviceCodec::expect_no_findings, released);
}

}  // namespace gradferry
