// What a rank on a device does with the gradients of its node, as an engine there does it, for
// measurements: the kernels of siblings, for a chunk that holds one parameter. Each call is one
// launch on the current stream.
#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "bindings.h"
#include "device_memory.h"
#include "gradferry/device_library.h"
#include "protocol/layout.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

// This rank is rank 0 of its node, and sums all tiles of the chunk.
class DeviceNode {
 public:
  // Holds the messages and tables of the chunk, and its sum. Throws Error(kConfig) for a size that
  // cannot be.
  DeviceNode(at::ScalarType dtype, uint64_t num_elements, c10::Device device, uint32_t num_ranks)
      : dtype_(to_scalar_type(dtype)),
        num_elements_(num_elements),
        device_(device),
        num_ranks_(num_ranks) {
    GRADFERRY_EXPECTS(num_elements >= 1 && num_ranks >= 1, kConfig,
                      "a node has at least one rank and one element, not " +
                          std::to_string(num_ranks) + " and " + std::to_string(num_elements));
    const uint64_t payload_bytes = (num_elements + kPieceAlignment - 1) / kPieceAlignment *
                                   kPieceAlignment * item_bytes(dtype_);
    const uint64_t stride = kHeaderBytes + payload_bytes;
    GRADFERRY_EXPECTS(stride <= UINT32_MAX / num_ranks, kConfig,
                      "messages of " + std::to_string(num_elements) + " elements from " +
                          std::to_string(num_ranks) + " ranks exceed 4 GiB; take fewer of either");
    std::vector<ChunkPiece> pieces;
    for (uint64_t begin = 0; begin < num_elements; begin += kTileElements) {
      const uint64_t count = std::min<uint64_t>(kTileElements, num_elements - begin);
      pieces.push_back(
          {begin, static_cast<uint32_t>(count), static_cast<uint32_t>(begin), /*message=*/0, 0});
    }
    num_pieces_ = static_cast<uint32_t>(pieces.size());
    std::vector<Message> messages;
    for (uint32_t rank = 0; rank < num_ranks; ++rank) {
      messages.push_back({static_cast<uint32_t>(rank * stride),
                          static_cast<uint32_t>(payload_bytes), rank, Phase::kLocalScatter, 0});
    }
    pieces_ = upload_to(device, pieces.data(), pieces.size() * sizeof(ChunkPiece));
    messages_ = upload_to(device, messages.data(), messages.size() * sizeof(Message));
    received_ = zeros_on(device, num_ranks * stride);
    sum_ = at::zeros({static_cast<int64_t>(num_elements)},
                     at::TensorOptions().dtype(dtype).device(device));
  }

  // Copies the gradient into a message to a sibling, which lies where this rank's own would.
  void pack(const at::Tensor& gradient) const { pack_as(0, gradient); }

  // What `rank` packs is what came from it.
  void receive(uint32_t rank, const at::Tensor& gradient) const {
    GRADFERRY_EXPECTS(
        rank >= 1 && rank < num_ranks_, kConfig,
        "rank must be 1 to " + std::to_string(num_ranks_ - 1) + ", not " + std::to_string(rank));
    pack_as(rank, gradient);
  }

  // The mean of this rank's gradient and those that came from all siblings; NaN if a message was
  // not received. On the device, overwritten by the next call.
  at::Tensor sum(const at::Tensor& gradient) const {
    expect_gradient(gradient, device_, dtype_, num_elements_);
    node_kernels().sum({.pieces = pieces(),
                        .num_pieces = num_pieces_,
                        .dtype = dtype_,
                        .gradient = gradient.const_data_ptr(),
                        .envelope = envelope_of(0),
                        .messages = messages(),
                        .num_messages = num_ranks_,
                        .received = static_cast<const std::byte*>(received_.const_data_ptr()),
                        .scale = 1.0 / num_ranks_,
                        .sum = sum_.mutable_data_ptr(),
                        .stream = current_stream_of(device_)});
    return sum_;
  }

 private:
  static Envelope envelope_of(uint32_t rank) {
    return {.config_hash = 0,
            .layout_hash = 0,
            .step = 0,
            .chunk = 0,
            .rank = rank,
            .phase = Phase::kLocalScatter};
  }
  void pack_as(uint32_t rank, const at::Tensor& gradient) const {
    expect_gradient(gradient, device_, dtype_, num_elements_);
    node_kernels().pack({.pieces = pieces(),
                         .num_pieces = num_pieces_,
                         .dtype = dtype_,
                         .gradient = gradient.const_data_ptr(),
                         .envelope = envelope_of(rank),
                         .messages = messages() + rank,
                         .num_messages = 1,
                         .out = static_cast<std::byte*>(received_.mutable_data_ptr()),
                         .stream = current_stream_of(device_)});
  }
  const ChunkPiece* pieces() const {
    return static_cast<const ChunkPiece*>(pieces_.const_data_ptr());
  }
  const Message* messages() const {
    return static_cast<const Message*>(messages_.const_data_ptr());
  }

  const ScalarType dtype_;
  const uint64_t num_elements_;
  const c10::Device device_;
  const uint32_t num_ranks_;
  uint32_t num_pieces_ = 0;
  at::Tensor pieces_, messages_, received_, sum_;  // on the device
};

}  // namespace

void bind_device_node(py::module_& module) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<DeviceNode>(module, "DeviceNode")
      .def(py::init<at::ScalarType, uint64_t, c10::Device, uint32_t>(), py::kw_only(),
           py::arg("dtype"), py::arg("num_elements"), py::arg("device"), py::arg("num_ranks"),
           released)
      .def("pack", &DeviceNode::pack, py::arg("gradient"), released)
      .def("receive", &DeviceNode::receive, py::arg("rank"), py::arg("gradient"), released)
      .def("sum", &DeviceNode::sum, py::arg("gradient"), released);
}

}  // namespace gradferry
