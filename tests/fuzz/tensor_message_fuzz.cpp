// Messages of single tensors: any bytes are decoded, or refused with a ProtocolError; several are
// accumulated if and only if each can be decoded, to the mean of what they decode to.
#include <cstring>
#include <string>
#include <vector>

#include "gradferry/wire.h"
#include "hooks/protocol/tensor_message.h"
#include "tests/fuzz/codec_calls.h"

namespace gradferry::fuzzing {
namespace {

using Message = std::vector<std::byte>;

template <ScalarType kDtype>
void round_to(std::span<const float> numbers, void* rounded) {
  auto* place = static_cast<std::byte*>(rounded);
  for (const float number : numbers) {
    testing::write_number(kDtype, number, place);
    place += item_bytes(kDtype);
  }
}

TensorMessages::Round round_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat32: return round_to<ScalarType::kFloat32>;
    case ScalarType::kBFloat16: return round_to<ScalarType::kBFloat16>;
    case ScalarType::kFloat16: return round_to<ScalarType::kFloat16>;
    default: return round_to<ScalarType::kFloat64>;
  }
}

// Where the lengths agree, so that what follows the check of the checksum is reached too.
void set_checksum(Message& message) {
  MessageHeader header;
  if (message.size() < sizeof(header)) return;
  std::memcpy(&header, message.data(), sizeof(header));
  header.checksum = 0;
  const size_t payload_bytes = message.size() - sizeof(header);
  header.checksum =
      word_sum(message.data() + sizeof(header), payload_bytes) +
      word_sum(reinterpret_cast<const std::byte*>(&header), sizeof(header), header.payload_bytes);
  std::memcpy(message.data(), &header, sizeof(header));
}

Message take_message(Bytes& input, const TensorMessages& messages, size_t tensor_bytes) {
  Message message(messages.message_bytes());
  std::vector<std::byte> numbers(tensor_bytes);
  fill(input, numbers.data(), numbers.size());
  messages.encode(numbers.data(), input.below(3), input.below(3), message.data());
  switch (input.below(4)) {
    case 0: return message;
    case 1: message.resize(input.below(2 * message.size()), std::byte(0)); break;
    case 2: fill(input, message.data() + kHeaderBytes, message.size() - kHeaderBytes); break;
    default: input.damage(message.data(), message.size());
  }
  if (input.flip()) set_checksum(message);
  return message;
}

// Whether `call` did not throw; what it throws is a ProtocolError.
template <typename Call>
bool accepted(const Call& call) {
  try {
    call();
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kProtocol) << error.what();
    EXPECT_NE(std::string(error.what()).find("message"), std::string::npos) << error.what();
    return false;
  }
}

}  // namespace

void run(Bytes input) {
  const std::string codec = take_codec(input);
  const ScalarType dtype = take_dtype(input, codec);
  const uint32_t n = input.below(8) == 0 ? 1 + input.below(2 * kTileElements) : take_size(input);
  const uint32_t divisor = 1 + input.below(4), count = 1 + input.below(3);
  const TensorMessages messages({codec, 11, 22}, dtype, n);
  const size_t tensor_bytes = size_t{n} * item_bytes(dtype);
  std::vector<Message> received;
  std::vector<std::span<const std::byte>> spans;
  std::vector<std::vector<std::byte>> decoded;
  bool all = true;
  for (uint32_t i = 0; i < count; ++i)
    received.push_back(take_message(input, messages, tensor_bytes));
  for (const Message& message : received) {
    spans.emplace_back(message);
    decoded.emplace_back(tensor_bytes);
    const bool good = accepted([&] { messages.decode(message, decoded.back().data()); });
    Message whole = message;
    set_checksum(whole);
    ASSERT_TRUE(!good || (whole == message && message.size() == messages.message_bytes()));
    all = good && all;
  }
  std::vector<std::byte> mean(tensor_bytes);
  ASSERT_EQ(all,
            accepted([&] { messages.accumulate(spans, divisor, round_of(dtype), mean.data()); }));
  if (!all || dtype != ScalarType::kFloat32) return;
  for (uint32_t i = 0; i < n; ++i) {
    const auto number = [&](const std::vector<std::byte>& tensor) {
      float x;
      std::memcpy(&x, tensor.data() + i * sizeof(x), sizeof(x));
      return x;
    };
    float sum = number(decoded[0]);
    for (uint32_t r = 1; r < count; ++r) sum += number(decoded[r]);
    std::byte expected[4];
    testing::write_number(dtype, sum * (1.0F / static_cast<float>(divisor)), expected);
    ASSERT_EQ(std::memcmp(expected, mean.data() + i * sizeof(float), sizeof(float)), 0) << i;
  }
}

}  // namespace gradferry::fuzzing
