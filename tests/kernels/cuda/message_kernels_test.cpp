// What kernels make of received messages, and the kernels of steps, against the definitions of
// docs/reference/wire_format.md in include/gradferry/wire.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/kernels/cuda/chunk_run.h"

namespace gradferry::testing {
namespace {

class Messages : public LibraryTest {};

// How many damages are tried of those that are alike, or how far they are apart.
uint32_t pick(uint32_t usual, uint32_t few) { return effort() == Effort::kFewTiles ? few : usual; }

constexpr Envelope kGather{.config_hash = 0x1122334455667788,
                           .layout_hash = 0x99aabbccddeeff00,
                           .step = 7,
                           .chunk = uint64_t{1} << 40,
                           .rank = 2,
                           .phase = Phase::kGather};

// Messages as they are received, one per rank, of tiles of random sizes and content: of the codec
// `exact`, which takes any.
struct Received {
  explicit Received(const std::vector<uint32_t>& tiles_by_rank)
      : verdicts(tiles_by_rank.size(), 77) {
    std::mt19937_64 random(3);
    for (uint32_t rank = 0; rank < tiles_by_rank.size(); ++rank) {
      Message message{static_cast<uint32_t>(buffer.size()), 0, rank, envelope.phase, 0};
      buffer.resize(buffer.size() + kHeaderBytes);
      for (uint32_t i = 0; i < tiles_by_rank[rank]; ++i) {
        const auto num_bytes = static_cast<uint32_t>(16 * (1 + random() % 200));
        const auto offset = static_cast<uint32_t>(buffer.size());
        tiles.push_back(
            {{tiles.size(), num_elements, 0, num_bytes / 4, offset, 0, message.payload_bytes},
             0,
             rank,
             0,
             0});
        num_elements += num_bytes / 4;
        for (uint32_t j = 0; j < num_bytes; ++j) buffer.push_back(std::byte(random() & 255));
        message.payload_bytes += num_bytes;
      }
      const uint64_t checksum =
          word_sum(buffer.data() + message.offset + kHeaderBytes, message.payload_bytes);
      Envelope sender = envelope;
      sender.rank = rank;
      const MessageHeader header = make_header(sender, message.payload_bytes, checksum);
      std::memcpy(buffer.data() + message.offset, &header, sizeof(header));
      messages.push_back(message);
      buffer.resize(buffer.size() + 32);  // padding, which nobody looks at
    }
  }

  MessageHeader& header(uint32_t rank) {
    return *reinterpret_cast<MessageHeader*>(buffer.data() + messages[rank].offset);
  }
  void check() {
    constexpr ChunkCodec kExact{0, 1.0f, 0.0f, {}};
    std::vector<uint64_t> progress(sizeof(ChunkProgress) / sizeof(uint64_t) + messages.size());
    std::vector<float> gradient(num_elements);
    std::vector<uint32_t> flags(tiles.size());
    Messages::library().chunks.decode(
        {.chunk = {.tiles = tiles.data(),
                   .num_tiles = static_cast<uint32_t>(tiles.size()),
                   .codecs = &kExact,
                   .rows = 1,
                   .dtype = ScalarType::kFloat32,
                   .hold_zero_tiles = false,
                   .seed = 0,
                   .envelope = envelope,
                   .progress = reinterpret_cast<ChunkProgress*>(progress.data()),
                   .stream = nullptr},
         .received = {messages.data(), static_cast<uint32_t>(messages.size()), buffer.data(),
                      verdicts.data()},
         .sent = nullptr,
         .gradient = gradient.data(),
         .residual = nullptr,
         .flags = flags.data(),
         .findings = &findings});
    for (const uint64_t word : progress) EXPECT_EQ(word, 0u);
  }
  void expect_fault(WireStatus status, uint32_t rank, uint64_t expected, uint64_t received) {
    EXPECT_EQ(static_cast<WireStatus>(findings.status), status);
    EXPECT_EQ(findings.phase, static_cast<uint32_t>(envelope.phase));
    EXPECT_EQ(findings.rank, rank);
    EXPECT_EQ(findings.step, envelope.step);
    EXPECT_EQ(findings.chunk, envelope.chunk);
    EXPECT_EQ(findings.expected, expected);
    EXPECT_EQ(findings.received, received);
  }

  Envelope envelope = kGather;
  std::vector<std::byte> buffer;
  std::vector<Message> messages;
  std::vector<ChunkTile> tiles;
  uint64_t num_elements = 0;
  std::vector<uint32_t> verdicts;
  Findings findings{};
};

TEST_P(Messages, CheckAcceptsWhatIsRight) {
  Received received({3, 0, 50, 1});
  received.check();
  EXPECT_EQ(received.verdicts, std::vector<uint32_t>(4, 0));
  EXPECT_EQ(received.findings.status, 0u);
}

TEST_P(Messages, CheckNamesEveryFieldThatIsWrong) {
  const struct {
    WireStatus status;
    void (*damage)(MessageHeader& header);
    uint64_t expected, received;
  } cases[] = {
      {WireStatus::kBadMagic, [](MessageHeader& h) { h.magic = 1; }, kWireMagic, 1},
      {WireStatus::kBadVersion, [](MessageHeader& h) { h.wire_version = 9; }, kWireVersion, 9},
      {WireStatus::kBadPhase, [](MessageHeader& h) { h.phase = 3; }, 2, 3},
      {WireStatus::kBadSource, [](MessageHeader& h) { h.source_rank = 0; }, 1, 0},
      {WireStatus::kBadConfig, [](MessageHeader& h) { h.config_hash = 5; }, kGather.config_hash, 5},
      {WireStatus::kBadLayout, [](MessageHeader& h) { h.layout_hash = 5; }, kGather.layout_hash, 5},
      {WireStatus::kBadStep, [](MessageHeader& h) { h.step = 8; }, 7, 8},
      {WireStatus::kBadChunk, [](MessageHeader& h) { h.chunk = 4; }, kGather.chunk, 4},
      {WireStatus::kPeerTrouble, [](MessageHeader& h) { h.status = 12; }, 0, 12},
  };
  for (const auto& c : cases) {
    Received received({2, 3, 2});
    c.damage(received.header(1));
    received.check();
    EXPECT_EQ(received.verdicts, (std::vector<uint32_t>{0, static_cast<uint32_t>(c.status), 0}));
    received.expect_fault(c.status, 1, c.expected, c.received);
  }
  Received received({2, 3, 2});
  const uint32_t size = received.messages[2].payload_bytes;
  received.header(2).payload_bytes = 16;
  received.check();
  received.expect_fault(WireStatus::kBadPayloadBytes, 2, size, 16);
}

TEST_P(Messages, CheckSeesEveryFlippedBitAndNoPadding) {
  Received received({1, 2});
  const std::vector<std::byte> right = received.buffer;
  std::vector<bool> covered(right.size(), false);
  for (const ChunkTile& tile : received.tiles) {
    const uint32_t num_bytes = 4 * tile.tile.num_elements;
    for (uint32_t i = 0; i < num_bytes; ++i) covered[tile.tile.payload_offset + i] = true;
  }
  const uint64_t checksum = received.header(1).checksum;
  for (size_t i = received.messages[1].offset + kHeaderBytes; i < right.size(); i += pick(5, 205)) {
    received.buffer = right;
    received.findings = {};
    received.buffer[i] ^= std::byte(1 << (i % 8));
    received.check();
    EXPECT_EQ(received.verdicts[1] != 0, covered[i]) << i;
    if (!covered[i]) continue;
    EXPECT_EQ(received.findings.status, static_cast<uint32_t>(WireStatus::kBadChecksum));
    EXPECT_EQ(received.findings.expected, checksum);
    EXPECT_NE(received.findings.received, checksum);
  }
}

// Of one bit in different words: a sum that loses its upper bits would not see them.
TEST_P(Messages, CheckSeesEveryPairOfFlippedBits) {
  Received received({1, 3});
  const std::vector<std::byte> right = received.buffer;
  const size_t first = received.messages[1].offset + kHeaderBytes;
  const uint32_t num_bits = 8 * received.messages[1].payload_bytes;
  const auto refused = [&](std::initializer_list<uint32_t> bits) {
    received.buffer = right;
    received.findings = {};
    for (const uint32_t bit : bits) received.buffer[first + bit / 8] ^= std::byte(1 << (bit % 8));
    received.check();
    return received.verdicts[1] == static_cast<uint32_t>(WireStatus::kBadChecksum);
  };
  std::mt19937_64 random(4);
  const auto random_bit = [&] { return static_cast<uint32_t>(random() % num_bits); };
  for (uint32_t i = 0; i < pick(100, 5); ++i) {
    const uint32_t a = random_bit();
    uint32_t b = random_bit();
    if (a == b) continue;
    ASSERT_TRUE(refused({a, b})) << a << " " << b;
    b = b / 32 * 32 + a % 32;
    if (a == b) continue;
    ASSERT_TRUE(refused({a, b})) << a << " " << b;
    ASSERT_TRUE(refused({a | 31, b | 31})) << a << " " << b;
  }
  // Neighbours, across the ends of tiles, too.
  for (uint32_t bit = 31; bit + 32 < num_bits; bit += pick(32, 32 * 41))
    ASSERT_TRUE(refused({bit, bit + 32}));
}

TEST_P(Messages, TheFirstFaultStaysUnlessItIsAnEcho) {
  Received received({1, 1, 1});
  received.header(1).status = 10;
  received.check();
  received.expect_fault(WireStatus::kPeerTrouble, 1, 0, 10);
  received.header(2).step = 9;
  received.check();
  received.expect_fault(WireStatus::kBadStep, 2, 7, 9);
  received.header(0).magic = 0;
  received.check();
  received.expect_fault(WireStatus::kBadStep, 2, 7, 9);
  EXPECT_EQ(received.verdicts[0], static_cast<uint32_t>(WireStatus::kBadMagic));
}

TEST_P(Messages, RescaleGivesTheGainToThePresentLossScale) {
  float residual_scale = 0, gain = 0;
  const auto rescale = [&](const float* loss_scale) {
    library().messages.rescale({loss_scale, &residual_scale, &gain, nullptr});
    return gain;
  };
  const float first = 1024, second = 512, third = 3;
  EXPECT_EQ(rescale(&first), 1.0f);
  EXPECT_EQ(rescale(&second), 0.5f);
  EXPECT_EQ(rescale(&third), 3.0f / 512.0f);
  EXPECT_EQ(rescale(nullptr), 1.0f / 3.0f);
  EXPECT_EQ(residual_scale, 1.0f);
}

TEST_P(Messages, ScaleMultipliesWhatStaysFinite) {
  for (const uint64_t n : {0, 1, 127, 129, 300000}) {
    std::vector<float> values(n), expected(n);
    for (uint64_t i = 0; i < n; ++i) {
      const bool huge = i % 7 == 3;
      values[i] = huge ? -0x1p127f : static_cast<float>(i) - 5;
      expected[i] = huge ? values[i] : values[i] * 3;
    }
    const float factor = 3, one = 1;
    library().messages.scale({&factor, values.data(), n, nullptr});
    EXPECT_EQ(values, expected);
    library().messages.scale({&one, values.data(), n, nullptr});
    EXPECT_EQ(values, expected);
  }
}

TEST_P(Messages, CommitWritesItsRecordAndTakesTheTile) {
  Findings findings{.status = 10,
                    .phase = 2,
                    .rank = 3,
                    .reserved = 0,
                    .step = 7,
                    .chunk = 0x500000006,
                    .expected = 11,
                    .received = 12,
                    .nonfinite_tile = 44};
  CommitRecord record{};
  uint64_t tile = 0;
  const float scale = 1024;
  library().messages.commit({7, 9, 2, &scale, &findings, &record, &tile, nullptr});
  CommitRecord expected{.magic = kWireMagic,
                        .wire_version = kWireVersion,
                        .phase = 3,
                        .status = 10,
                        .source_rank = 2,
                        .step = 7,
                        .bucket = 9,
                        .failed_chunk = 6,
                        .failed_phase = 2,
                        .failed_rank = 3,
                        .expected = 11,
                        .received = 12,
                        .checksum = 0};
  expected.checksum =
      word_sum(reinterpret_cast<const std::byte*>(&expected), offsetof(CommitRecord, checksum));
  EXPECT_EQ(std::memcmp(&record, &expected, sizeof(record)), 0);
  EXPECT_EQ(tile, 44u);
  EXPECT_EQ(findings.nonfinite_tile, 0u);
  EXPECT_EQ(findings.status, 10u);  // stays
}

TEST_P(Messages, CommitWithoutAnErrorHasTheLossScale) {
  for (const float scale : {1024.0f, std::numeric_limits<float>::infinity(), 0.0f}) {
    Findings findings{};
    CommitRecord record{};
    uint64_t tile = 0;
    const bool is_there = scale != 0;
    library().messages.commit(
        {7, 9, 2, is_there ? &scale : nullptr, &findings, &record, &tile, nullptr});
    EXPECT_EQ(record.status, 0u);
    EXPECT_EQ(record.expected, 0u);
    EXPECT_EQ(record.received, std::bit_cast<uint32_t>(scale));
    const auto* bytes = reinterpret_cast<const std::byte*>(&record);
    EXPECT_EQ(record.checksum, word_sum(bytes, offsetof(CommitRecord, checksum)));
  }
}

INSTANTIATE_TEST_SUITE_P(Libraries, Messages, ::testing::ValuesIn(both_libraries()), library_name);

}  // namespace
}  // namespace gradferry::testing
