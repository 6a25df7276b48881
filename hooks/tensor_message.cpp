#include "tensor_message.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "gradferry/codec.h"
#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

struct TensorPlan {
  ParsedCodec codec;
  ScalarType dtype;
  std::vector<Tile> tiles;
  uint32_t payload_bytes;
};

TensorPlan plan_tensor(const at::Tensor& tensor, const std::string& codec) {
  GRADFERRY_EXPECTS(tensor.device().is_cpu(), kConfig,
                    "tensor is on " + tensor.device().str() + "; move it to the CPU");
  GRADFERRY_EXPECTS(tensor.numel() > 0, kConfig, "tensor is empty; there is nothing to encode");
  GRADFERRY_EXPECTS(tensor.is_contiguous(), kConfig,
                    "tensor is not contiguous; call .contiguous() first");
  TensorPlan plan{parse_codec(codec, Device::kCpu), to_scalar_type(tensor.scalar_type()), {}, 0};
  GRADFERRY_EXPECTS(plan.dtype != ScalarType::kFloat64 || plan.codec.codec->supports_float64,
                    kConfig,
                    "codec '" + plan.codec.canonical +
                        "' does not take float64; use 'exact', or convert the tensor to float32");
  const auto n = static_cast<uint64_t>(tensor.numel());
  uint64_t offset = 0;
  for (uint64_t start = 0; start < n; start += kTileElements) {
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(kTileElements, n - start));
    plan.tiles.push_back({.id = plan.tiles.size(),
                          .gradient_offset = start,
                          .residual_offset = 0,
                          .num_elements = count,
                          .payload_offset = static_cast<uint32_t>(offset),
                          .output_offset = 0,
                          .message_offset = static_cast<uint32_t>(offset)});
    offset +=
        plan.codec.codec->payload_bytes(count, plan.dtype, Stage::kWorker, plan.codec.options);
    GRADFERRY_EXPECTS(offset <= UINT32_MAX, kConfig,
                      "tensor has " + std::to_string(n) +
                          " elements, too many for one message of 4 GiB; encode it in parts");
  }
  plan.payload_bytes = static_cast<uint32_t>(offset);
  return plan;
}

TileBatch batch_of(const TensorPlan& plan, const MessageHeader& header,
                   std::vector<TileStatus>& status) {
  status.resize(plan.tiles.size());
  return {.tiles = plan.tiles.data(),
          .num_tiles = static_cast<uint32_t>(plan.tiles.size()),
          .dtype = plan.dtype,
          .stage = Stage::kWorker,
          .hold_zero_tiles = true,
          .seed = header.seed,
          .step = header.step,
          .options = &plan.codec.options,
          .status = status.data(),
          .stream = nullptr};
}

// Covers the payload and then the words of the header, because nothing else protects the header's
// seed and step.
uint64_t message_checksum(uint64_t payload_checksum, MessageHeader header) {
  header.checksum = 0;
  return payload_checksum + word_sum(reinterpret_cast<const std::byte*>(&header), sizeof(header),
                                     header.payload_bytes);
}

MessageHeader header_of(const TensorPlan& plan, const TensorMessageOptions& options, uint64_t seed,
                        uint64_t step) {
  const Envelope envelope{.config_hash = options.config_hash,
                          .layout_hash = options.layout_hash,
                          .step = step,
                          .chunk = 0,
                          .rank = 0,
                          .phase = Phase::kTensor};
  MessageHeader header = make_header(envelope, plan.payload_bytes, /*checksum=*/0);
  header.seed = seed;
  return header;
}

// The name, for error messages, of the field with that fault.
std::string field_name(WireStatus refused) {
  if (refused == WireStatus::kBadConfig) return "codec hash";
  if (refused == WireStatus::kBadLayout) return "dtype or size hash";
  const auto field = std::ranges::find(kHeaderFields, refused, &HeaderField::refused);
  std::string name = field->name;
  std::ranges::replace(name, '_', ' ');
  return name;
}

}  // namespace

at::Tensor encode_tensor(const at::Tensor& tensor, const TensorMessageOptions& options,
                         uint64_t seed, uint64_t step) {
  const TensorPlan plan = plan_tensor(tensor, options.codec);
  MessageHeader header = header_of(plan, options, seed, step);
  at::Tensor message = at::zeros({static_cast<int64_t>(sizeof(header) + plan.payload_bytes)},
                                 at::TensorOptions().dtype(at::kByte));
  auto* bytes = static_cast<std::byte*>(message.mutable_data_ptr());
  std::vector<TileStatus> status;
  plan.codec.codec->encode(batch_of(plan, header, status), tensor.const_data_ptr(), 1.0F, nullptr,
                           nullptr, bytes + sizeof(header));
  uint64_t checksum = 0;
  for (const TileStatus& tile : status) checksum += tile.checksum;
  header.checksum = message_checksum(checksum, header);
  std::memcpy(bytes, &header, sizeof(header));
  return message;
}

void decode_tensor(const at::Tensor& message, const TensorMessageOptions& options,
                   const at::Tensor& out) {
  const TensorPlan plan = plan_tensor(out, options.codec);
  GRADFERRY_EXPECTS(message.device().is_cpu() && message.scalar_type() == at::kByte &&
                        message.dim() == 1 && message.is_contiguous(),
                    kConfig,
                    "message must be a contiguous one-dimensional uint8 tensor on the CPU, as "
                    "encode() returns it");
  const uint64_t expected_bytes = sizeof(MessageHeader) + plan.payload_bytes;
  GRADFERRY_EXPECTS(message.nbytes() == expected_bytes, kProtocol,
                    "message has " + std::to_string(message.nbytes()) + " bytes, expected " +
                        std::to_string(expected_bytes) +
                        " for this codec, shape and dtype; pass the ones it was encoded with");
  const auto* bytes = static_cast<const std::byte*>(message.const_data_ptr());
  MessageHeader received;
  std::memcpy(&received, bytes, sizeof(received));
  // Checks the payload before it decodes: a tensor is never partly written.
  MessageHeader expected = header_of(plan, options, received.seed, received.step);
  expected.checksum =
      message_checksum(word_sum(bytes + sizeof(received), plan.payload_bytes), received);
  const HeaderMismatch found = first_mismatch(expected, std::bit_cast<HeaderWords>(received));
  GRADFERRY_EXPECTS(found.status != WireStatus::kBadChecksum, kProtocol,
                    "message has checksum " + std::to_string(found.expected) +
                        " but its bytes sum to " + std::to_string(found.received) +
                        "; they were damaged");
  GRADFERRY_EXPECTS(found.status == WireStatus::kOk, kProtocol,
                    "message has " + field_name(found.status) + " " +
                        std::to_string(found.received) + ", expected " +
                        std::to_string(found.expected) +
                        "; pass the codec, shape and dtype it was encoded with");
  std::vector<TileStatus> status;
  plan.codec.codec->decode(batch_of(plan, received, status), bytes + sizeof(received),
                           out.mutable_data_ptr(), 0.0F, nullptr);
  for (uint32_t i = 0; i < status.size(); ++i) {
    GRADFERRY_EXPECTS((status[i].flags & kTileCorrupt) == 0, kProtocol,
                      "tile " + std::to_string(i) + " of the message breaks the format of codec '" +
                          plan.codec.canonical + "'; it was not written by gradferry");
  }
}

}  // namespace gradferry
