#include "protocol/tensor_message.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "gradferry/error.h"

namespace gradferry {
namespace {

// Covers the payload and then the words of the header, because nothing else protects the header's
// seed and step.
uint64_t message_checksum(uint64_t payload_checksum, MessageHeader header) {
  header.checksum = 0;
  return payload_checksum + word_sum(reinterpret_cast<const std::byte*>(&header), sizeof(header),
                                     header.payload_bytes);
}

// The name, for error messages, of the field with that fault.
std::string field_name(WireStatus fault) {
  if (fault == WireStatus::kBadConfig) return "codec hash";
  if (fault == WireStatus::kBadLayout) return "dtype or size hash";
  const auto field = std::ranges::find(kHeaderFields, fault, &HeaderField::mismatch);
  std::string name = field->name;
  std::ranges::replace(name, '_', ' ');
  return name;
}

bool is_corrupt(const TileStatus& tile) { return (tile.flags & kTileCorrupt) != 0; }

}  // namespace

struct TensorMessages::Received {
  MessageHeader header;
  const std::byte* payload;
};

TensorMessages::TensorMessages(const TensorMessageOptions& options, ScalarType dtype,
                               uint64_t num_elements)
    : options_(options), codec_(parse_codec(options.codec)), dtype_(dtype) {
  GRADFERRY_EXPECTS(num_elements > 0, kConfig, "tensor is empty; there is nothing to encode");
  GRADFERRY_EXPECTS(dtype != ScalarType::kFloat64 || codec_.codec->supports_float64, kConfig,
                    "codec '" + codec_.canonical +
                        "' does not take float64; use 'exact', or convert the tensor to float32");
  uint64_t offset = 0;
  for (uint64_t start = 0; start < num_elements; start += kTileElements) {
    const auto count =
        static_cast<uint32_t>(std::min<uint64_t>(kTileElements, num_elements - start));
    tiles_.push_back({.id = tiles_.size(),
                      .gradient_offset = start,
                      .residual_offset = 0,
                      .num_elements = count,
                      .payload_offset = static_cast<uint32_t>(offset),
                      .output_offset = 0,
                      .message_offset = static_cast<uint32_t>(offset)});
    offset += codec_.codec->payload_bytes(count, dtype, Stage::kWorker, codec_.options);
    GRADFERRY_EXPECTS(offset <= UINT32_MAX, kConfig,
                      "tensor has " + std::to_string(num_elements) +
                          " elements, too many for one message of 4 GiB; encode it in parts");
  }
  payload_bytes_ = static_cast<uint32_t>(offset);
}

uint64_t TensorMessages::message_bytes() const { return sizeof(MessageHeader) + payload_bytes_; }

TileBatch TensorMessages::batch(const MessageHeader& header,
                                std::vector<TileStatus>& status) const {
  status.resize(tiles_.size());
  return {.tiles = tiles_.data(),
          .num_tiles = static_cast<uint32_t>(tiles_.size()),
          .dtype = dtype_,
          .stage = Stage::kWorker,
          .hold_zero_tiles = true,
          .seed = header.seed,
          .step = header.step,
          .options = &codec_.options,
          .status = status.data()};
}

MessageHeader TensorMessages::header(uint64_t seed, uint64_t step) const {
  const Envelope envelope{.config_hash = options_.config_hash,
                          .layout_hash = options_.layout_hash,
                          .step = step,
                          .chunk = 0,
                          .rank = 0,
                          .phase = Phase::kTensor};
  MessageHeader header = make_header(envelope, payload_bytes_, /*checksum=*/0);
  header.seed = seed;
  return header;
}

// Checks everything but what the payload says. `name` of the message is for errors.
TensorMessages::Received TensorMessages::receive(std::span<const std::byte> message,
                                                 const std::string& name) const {
  GRADFERRY_EXPECTS(message.size() == message_bytes(), kProtocol,
                    name + " has " + std::to_string(message.size()) + " bytes, expected " +
                        std::to_string(message_bytes()) +
                        " for this codec, shape and dtype; pass the ones it was encoded with");
  Received received{{}, message.data() + sizeof(MessageHeader)};
  std::memcpy(&received.header, message.data(), sizeof(MessageHeader));
  MessageHeader expected = header(received.header.seed, received.header.step);
  expected.checksum = message_checksum(word_sum(received.payload, payload_bytes_), received.header);
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

void TensorMessages::expect_valid_tiles(const std::vector<TileStatus>& status,
                                        const std::string& name) const {
  const auto found = std::ranges::find_if(status, is_corrupt);
  GRADFERRY_EXPECTS(found == status.end(), kProtocol,
                    "tile " + std::to_string(found - status.begin()) + " of " + name +
                        " breaks the format of codec '" + codec_.canonical +
                        "'; it was not written by gradferry");
}

void TensorMessages::encode(const void* numbers, uint64_t seed, uint64_t step,
                            std::byte* message) const {
  MessageHeader written = header(seed, step);
  std::vector<TileStatus> status;
  codec_.codec->encode(batch(written, status), numbers, 1.0F, nullptr, nullptr,
                       message + sizeof(written));
  uint64_t checksum = 0;
  for (const TileStatus& tile : status) checksum += tile.checksum;
  written.checksum = message_checksum(checksum, written);
  std::memcpy(message, &written, sizeof(written));
}

void TensorMessages::decode(std::span<const std::byte> message, void* numbers) const {
  const Received received = receive(message, "message");
  std::vector<TileStatus> status;
  codec_.codec->decode(batch(received.header, status), received.payload, numbers, 0.0F, nullptr);
  expect_valid_tiles(status, "the message");
}

// False if a tile of a message is corrupt; `numbers` then have no meaning.
bool TensorMessages::accumulate_at_once(const std::vector<Received>& received, uint32_t divisor,
                                        void* numbers) const {
  std::vector<const std::byte*> payloads;
  for (const Received& each : received) payloads.push_back(each.payload);
  std::vector<TileStatus> status;
  codec_.codec->accumulate(batch(received[0].header, status), payloads.data(),
                           static_cast<uint32_t>(payloads.size()), divisor, numbers);
  return std::ranges::none_of(status, is_corrupt);
}

// The same for messages that have random numbers of their own: of each a tile is decoded in fp32,
// and `exact` adds these up.
bool TensorMessages::accumulate_by_tile(const std::vector<Received>& received, uint32_t divisor,
                                        Round round, void* numbers) const {
  const ParsedCodec exact = parse_codec("exact");
  std::vector<float> decoded(received.size() * kTileElements);
  std::vector<const std::byte*> terms;
  for (size_t i = 0; i < received.size(); ++i) {
    terms.push_back(reinterpret_cast<const std::byte*>(decoded.data() + i * kTileElements));
  }
  std::vector<float> quotient(kTileElements);
  bool valid = true;
  for (const Tile& tile : tiles_) {
    Tile part = tile;
    TileStatus status;
    TileBatch batch{.tiles = &part,
                    .num_tiles = 1,
                    .dtype = ScalarType::kFloat32,
                    .stage = Stage::kWorker,
                    .hold_zero_tiles = true,
                    .seed = 0,
                    .step = 0,
                    .options = &codec_.options,
                    .status = &status};
    for (size_t i = 0; i < received.size(); ++i) {
      part.gradient_offset = i * kTileElements;
      batch.seed = received[i].header.seed;
      batch.step = received[i].header.step;
      codec_.codec->decode(batch, received[i].payload, decoded.data(), 0.0F, nullptr);
      valid = valid && !is_corrupt(status);
    }
    part.gradient_offset = 0;
    part.payload_offset = 0;
    batch.options = &exact.options;
    exact.codec->accumulate(batch, terms.data(), static_cast<uint32_t>(terms.size()), divisor,
                            quotient.data());
    round({quotient.data(), tile.num_elements},
          static_cast<std::byte*>(numbers) + tile.gradient_offset * item_bytes(dtype_));
  }
  return valid;
}

void TensorMessages::accumulate(std::span<const std::span<const std::byte>> messages,
                                uint32_t divisor, Round round, void* numbers) const {
  GRADFERRY_EXPECTS(!messages.empty() && messages.size() <= UINT32_MAX && divisor > 0, kConfig,
                    std::to_string(messages.size()) + " messages cannot be divided by " +
                        std::to_string(divisor) + "; pass at least one message, and 1 or more");
  const auto name = [](size_t index) { return "message " + std::to_string(index); };
  std::vector<Received> received;
  for (size_t i = 0; i < messages.size(); ++i) received.push_back(receive(messages[i], name(i)));
  const auto as_first = [&](const Received& each) {
    return each.header.seed == received[0].header.seed &&
           each.header.step == received[0].header.step;
  };
  // A batch of tiles has one seed. Workers should use different ones, so that their errors average
  // out: then tile by tile, up to twice as slow for rht.
  const bool valid = !codec_.codec->seeded || std::ranges::all_of(received, as_first)
                         ? accumulate_at_once(received, divisor, numbers)
                         : accumulate_by_tile(received, divisor, round, numbers);
  if (valid) return;
  std::vector<TileStatus> status;
  for (size_t i = 0; i < messages.size(); ++i) {
    codec_.codec->decode(batch(received[i].header, status), received[i].payload, nullptr, 0.0F,
                         nullptr);
    expect_valid_tiles(status, name(i));
  }
}

}  // namespace gradferry
