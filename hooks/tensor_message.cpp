#include "tensor_message.h"

#include <ATen/Dispatch.h>
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

struct Received {
  MessageHeader header;
  const std::byte* payload;
};

// Checks everything but what the payload says. `name` of the message is for errors.
Received receive(const at::Tensor& message, const TensorPlan& plan,
                 const TensorMessageOptions& options, const std::string& name) {
  GRADFERRY_EXPECTS(message.device().is_cpu() && message.scalar_type() == at::kByte &&
                        message.dim() == 1 && message.is_contiguous(),
                    kConfig,
                    name +
                        " must be a contiguous one-dimensional uint8 tensor on the CPU, as "
                        "encode() returns it");
  const uint64_t expected_bytes = sizeof(MessageHeader) + plan.payload_bytes;
  GRADFERRY_EXPECTS(message.nbytes() == expected_bytes, kProtocol,
                    name + " has " + std::to_string(message.nbytes()) + " bytes, expected " +
                        std::to_string(expected_bytes) +
                        " for this codec, shape and dtype; pass the ones it was encoded with");
  const auto* bytes = static_cast<const std::byte*>(message.const_data_ptr());
  Received received{{}, bytes + sizeof(MessageHeader)};
  std::memcpy(&received.header, bytes, sizeof(MessageHeader));
  MessageHeader expected = header_of(plan, options, received.header.seed, received.header.step);
  expected.checksum =
      message_checksum(word_sum(received.payload, plan.payload_bytes), received.header);
  const HeaderMismatch found =
      first_mismatch(expected, std::bit_cast<HeaderWords>(received.header));
  GRADFERRY_EXPECTS(found.status != WireStatus::kBadChecksum, kProtocol,
                    name + " has checksum " + std::to_string(found.expected) +
                        " but its bytes sum to " + std::to_string(found.received) +
                        "; they were damaged");
  GRADFERRY_EXPECTS(found.status == WireStatus::kOk, kProtocol,
                    name + " has " + field_name(found.status) + " " +
                        std::to_string(found.received) + ", expected " +
                        std::to_string(found.expected) +
                        "; pass the codec, shape and dtype it was encoded with");
  return received;
}

bool is_corrupt(const TileStatus& tile) { return (tile.flags & kTileCorrupt) != 0; }

void expect_valid_tiles(const TensorPlan& plan, const std::vector<TileStatus>& status,
                        const std::string& name) {
  const auto found = std::ranges::find_if(status, is_corrupt);
  GRADFERRY_EXPECTS(found == status.end(), kProtocol,
                    "tile " + std::to_string(found - status.begin()) + " of " + name +
                        " breaks the format of codec '" + plan.codec.canonical +
                        "'; it was not written by gradferry");
}

// False if a tile of a message is corrupt; `out` then has no meaning.
bool accumulate_at_once(const TensorPlan& plan, const std::vector<Received>& received,
                        uint32_t divisor, const at::Tensor& out) {
  std::vector<const std::byte*> payloads;
  for (const Received& each : received) payloads.push_back(each.payload);
  std::vector<TileStatus> status;
  plan.codec.codec->accumulate(batch_of(plan, received[0].header, status), payloads.data(),
                               static_cast<uint32_t>(payloads.size()), divisor,
                               out.mutable_data_ptr());
  return std::ranges::none_of(status, is_corrupt);
}

// The same for messages that have random numbers of their own: of each a tile is decoded in fp32,
// and `exact` adds these up.
bool accumulate_by_tile(const TensorPlan& plan, const std::vector<Received>& received,
                        uint32_t divisor, const at::Tensor& out) {
  const ParsedCodec exact = parse_codec("exact", Device::kCpu);
  std::vector<float> decoded(received.size() * kTileElements);
  std::vector<const std::byte*> terms;
  for (size_t i = 0; i < received.size(); ++i) {
    terms.push_back(reinterpret_cast<const std::byte*>(decoded.data() + i * kTileElements));
  }
  std::vector<float> quotient(kTileElements);
  bool valid = true;
  for (const Tile& tile : plan.tiles) {
    Tile part = tile;
    TileStatus status;
    TileBatch batch{.tiles = &part,
                    .num_tiles = 1,
                    .dtype = ScalarType::kFloat32,
                    .stage = Stage::kWorker,
                    .hold_zero_tiles = true,
                    .seed = 0,
                    .step = 0,
                    .options = &plan.codec.options,
                    .status = &status,
                    .stream = nullptr};
    for (size_t i = 0; i < received.size(); ++i) {
      part.gradient_offset = i * kTileElements;
      batch.seed = received[i].header.seed;
      batch.step = received[i].header.step;
      plan.codec.codec->decode(batch, received[i].payload, decoded.data(), 0.0F, nullptr);
      valid = valid && !is_corrupt(status);
    }
    part.gradient_offset = 0;
    part.payload_offset = 0;
    batch.options = &exact.options;
    exact.codec->accumulate(batch, terms.data(), static_cast<uint32_t>(terms.size()), divisor,
                            quotient.data());
    // Not at::copy_, which writes another NaN.
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, out.scalar_type(), "accumulate", [&] {
      std::copy_n(quotient.data(), tile.num_elements,
                  out.mutable_data_ptr<scalar_t>() + tile.gradient_offset);
    });
  }
  return valid;
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
  const Received received = receive(message, plan, options, "message");
  std::vector<TileStatus> status;
  plan.codec.codec->decode(batch_of(plan, received.header, status), received.payload,
                           out.mutable_data_ptr(), 0.0F, nullptr);
  expect_valid_tiles(plan, status, "the message");
}

void accumulate_tensors(const std::vector<at::Tensor>& messages,
                        const TensorMessageOptions& options, uint32_t divisor,
                        const at::Tensor& out) {
  GRADFERRY_EXPECTS(!messages.empty() && messages.size() <= UINT32_MAX && divisor > 0, kConfig,
                    std::to_string(messages.size()) + " messages cannot be divided by " +
                        std::to_string(divisor) + "; pass at least one message, and 1 or more");
  const TensorPlan plan = plan_tensor(out, options.codec);
  const auto name = [](size_t index) { return "message " + std::to_string(index); };
  std::vector<Received> received;
  for (size_t i = 0; i < messages.size(); ++i) {
    received.push_back(receive(messages[i], plan, options, name(i)));
  }
  const auto as_first = [&](const Received& each) {
    return each.header.seed == received[0].header.seed &&
           each.header.step == received[0].header.step;
  };
  const bool valid = !plan.codec.codec->seeded || std::ranges::all_of(received, as_first)
                         ? accumulate_at_once(plan, received, divisor, out)
                         : accumulate_by_tile(plan, received, divisor, out);
  if (valid) return;
  std::vector<TileStatus> status;
  for (size_t i = 0; i < messages.size(); ++i) {
    plan.codec.codec->decode(batch_of(plan, received[i].header, status), received[i].payload,
                             nullptr, 0.0F, nullptr);
    expect_valid_tiles(plan, status, name(i));
  }
}

}  // namespace gradferry
