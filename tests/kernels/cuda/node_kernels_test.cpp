// The kernels between ranks of one node, against sums in plain numbers; and what the kernels of a
// chunk do for siblings.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/kernels/cuda/chunk_run.h"

namespace gradferry::testing {
namespace {

class Nodes : public LibraryTest {};

constexpr ScalarType kTypes[] = {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16,
                                 ScalarType::kFloat64};

Envelope local_envelope(uint32_t rank) {
  Envelope envelope = kEnvelope;
  envelope.rank = rank;
  envelope.phase = Phase::kLocalScatter;
  return envelope;
}

// Ranks from 4 on share a node; this one is 5, whose rail has the tiles of `sizes`. Its bucket
// holds them with gaps, so that they begin wherever an item may.
struct Node {
  Node(ScalarType type, const std::vector<uint32_t>& sizes, Input input, uint32_t ranks = 3)
      : dtype(type), item(item_bytes(type)), num_ranks(ranks) {
    uint64_t in_bucket = 3;
    uint32_t in_message = 0;
    for (const uint32_t n : sizes) {
      pieces.push_back({in_bucket, n, in_message, kOwn, 0});
      in_bucket += n + 1;
      in_message += (n + 15) / 16 * 16;
    }
    num_summed = in_message;
    const uint32_t payload = in_message * item;
    for (uint32_t i = 0; i < num_ranks; ++i) {
      messages.push_back({i * (kHeaderBytes + payload), payload, 4 + i, Phase::kLocalScatter, 0});
      buckets.emplace_back(in_bucket * item, item);
      const std::vector<double> values = make_input(input, in_bucket, 20 + i);
      for (size_t k = 0; k < in_bucket; ++k) {
        write_number(dtype, values[k], buckets[i].data() + k * item);
      }
    }
    received = Buffer(num_ranks * (kHeaderBytes + payload));
    sum = Buffer(num_summed * item);
  }

  // What rank 4 + i sends to this one, into its place.
  void pack(uint32_t i) {
    std::vector<ChunkPiece> to_one = pieces;
    for (ChunkPiece& piece : to_one) piece.message = i;
    Nodes::library().nodes.pack({to_one.data(), static_cast<uint32_t>(to_one.size()), dtype,
                                 buckets[i].data(), local_envelope(4 + i), messages.data(),
                                 num_ranks, out.data(), nullptr});
  }
  void exchange() {
    for (uint32_t i = 0; i < num_ranks; ++i) {
      if (i == kOwn) continue;
      out = Buffer(received.size());
      pack(i);
      EXPECT_TRUE(out.guards_intact());
      const Message& message = messages[i];
      std::memcpy(received.data() + message.offset, out.data() + message.offset,
                  kHeaderBytes + message.payload_bytes);
    }
  }
  void add(double scale) {
    Nodes::library().nodes.sum({pieces.data(), static_cast<uint32_t>(pieces.size()), dtype,
                                buckets[kOwn].data(), local_envelope(4 + kOwn), messages.data(),
                                num_ranks, received.data(), scale, sum.data(), nullptr});
    EXPECT_TRUE(sum.guards_intact());
    EXPECT_TRUE(received.guards_intact());
  }
  double number(uint32_t rank, const ChunkPiece& piece, uint32_t k) const {
    return read_number(dtype, buckets[rank].data() + (piece.gradient_offset + k) * item);
  }
  double summed(const ChunkPiece& piece, uint32_t k) const {
    return read_number(dtype, sum.data() + (piece.offset + k) * item);
  }

  static constexpr uint32_t kOwn = 1;
  ScalarType dtype;
  uint32_t item;
  uint32_t num_ranks;
  std::vector<ChunkPiece> pieces;
  std::vector<Message> messages;
  std::vector<Buffer> buckets;  // by rank
  Buffer out, received, sum;
  uint32_t num_summed = 0;
};

// In rank order, in fp32 or fp64, where every operation is rounded once.
template <typename Number>
Number expected_sum(const Node& node, const ChunkPiece& piece, uint32_t k, double scale) {
  auto total = static_cast<Number>(node.number(0, piece, k));
  for (uint32_t rank = 1; rank < node.num_ranks; ++rank) {
    total += static_cast<Number>(node.number(rank, piece, k));
  }
  return total * static_cast<Number>(scale);
}

const std::vector<uint32_t> kSizes = {4096, 77, 1, 1030, 4095, 5, 16};

TEST_P(Nodes, SumInRankOrderWhateverTheAlignment) {
  for (const ScalarType dtype : kTypes) {
    for (const Input input : {Input::kGaussian, Input::kHuge, Input::kTiny, Input::kNonFinite}) {
      // 10 are more than a kernel has on their way at once.
      const uint32_t num_ranks = input == Input::kGaussian ? 10 : 3;
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " of " + std::to_string(num_ranks));
      Node node(dtype, kSizes, input, num_ranks);
      node.exchange();
      constexpr double kScale = 2.0 / 3.0;  // of two nodes with three ranks in all, say
      node.add(kScale);
      for (const ChunkPiece& piece : node.pieces) {
        for (uint32_t k = 0; k < piece.num_elements; ++k) {
          std::array<std::byte, 8> rounded{};
          write_number(dtype,
                       dtype == ScalarType::kFloat64 ? expected_sum<double>(node, piece, k, kScale)
                                                     : expected_sum<float>(node, piece, k, kScale),
                       rounded.data());
          const double want = read_number(dtype, rounded.data());
          const double got = node.summed(piece, k);
          if (std::isnan(want)) {
            ASSERT_TRUE(std::isnan(got)) << piece.num_elements << " " << k;
          } else {
            ASSERT_EQ(got, want) << piece.num_elements << " " << k;
            ASSERT_EQ(std::signbit(got), std::signbit(want));
          }
        }
      }
    }
  }
}

TEST_P(Nodes, PackMovesEveryBitAndWritesHeaders) {
  for (const ScalarType dtype : kTypes) {
    SCOPED_TRACE(dtype_name(dtype));
    Node node(dtype, kSizes, Input::kNonFinite);
    node.out = Buffer(node.received.size());
    node.pack(2);
    for (uint32_t m = 0; m < node.num_ranks; ++m) {
      const MessageHeader header =
          make_header(local_envelope(6), node.messages[m].payload_bytes, 0);
      EXPECT_EQ(std::memcmp(node.out.data() + node.messages[m].offset, &header, sizeof(header)), 0);
    }
    const std::byte* payload = node.out.data() + node.messages[2].offset + kHeaderBytes;
    for (const ChunkPiece& piece : node.pieces) {
      EXPECT_EQ(std::memcmp(payload + piece.offset * node.item,
                            node.buckets[2].data() + piece.gradient_offset * node.item,
                            piece.num_elements * node.item),
                0);
    }
  }
}

TEST_P(Nodes, AnEmptyRailIsHeadersAlone) {
  Node node(ScalarType::kFloat32, {}, Input::kGaussian);
  node.exchange();
  node.add(0.5);
  const MessageHeader header = make_header(local_envelope(6), 0, 0);
  EXPECT_EQ(std::memcmp(node.received.data() + node.messages[2].offset, &header, sizeof(header)),
            0);
}

// This rank's own message is never looked at.
TEST_P(Nodes, AWrongHeaderMakesTheSumNaN) {
  for (const ScalarType dtype : kTypes) {
    for (const uint32_t damaged : {0u, 1u, 2u}) {
      Node node(dtype, {70, 5}, Input::kGaussian);
      node.exchange();
      node.received.data()[node.messages[damaged].offset + 32] ^= std::byte{1};  // the step
      node.add(0.5);
      for (const ChunkPiece& piece : node.pieces) {
        for (uint32_t k = 0; k < piece.num_elements; ++k) {
          ASSERT_EQ(std::isnan(node.summed(piece, k)), damaged != Node::kOwn);
        }
      }
    }
  }
}

// --- chunks --------------------------------------------------------------------------------------

// Headers of two siblings, as reduce finds them, and a place for the message to them.
struct Siblings {
  explicit Siblings(ChunkRun& run) {
    for (uint32_t i = 0; i < 2; ++i) {
      messages.push_back({i * kHeaderBytes, 0, i, Phase::kLocalScatter, 0});
      const MessageHeader header = make_header(run.envelope(i, Phase::kLocalScatter), 0, 0);
      std::memcpy(received.data() + messages[i].offset, &header, sizeof(header));
    }
    run.from_siblings = {messages.data(), 2, received.data(), verdicts.data()};
    run.forward = forward.data();
    run.forward_bytes = static_cast<uint32_t>(forward.size());
  }
  void expect_forward(const ChunkRun& run, uint32_t status) const {
    const MessageHeader header =
        make_header(run.envelope(0, Phase::kForward),
                    static_cast<uint32_t>(forward.size()) - kHeaderBytes, 0, status);
    EXPECT_EQ(std::memcmp(forward.data(), &header, sizeof(header)), 0);
  }
  std::vector<Message> messages;
  std::vector<uint32_t> verdicts = {77, 77};
  Buffer received{2 * kHeaderBytes};
  Buffer forward{512};
};

TEST_P(Nodes, ReduceChecksSiblingsAndWritesTheForwardHeader) {
  ChunkRun run(small_setup(), library()), host(small_setup());
  run.until_reduce(), host.until_reduce();
  Siblings siblings(run);
  run.reduce(0);
  host.reduce(0);
  EXPECT_TRUE(run.ranks[0].message == host.ranks[0].message);
  EXPECT_EQ(siblings.verdicts, (std::vector<uint32_t>{0, 0}));
  EXPECT_EQ(run.findings.status, 0u);
  siblings.expect_forward(run, 0);
}

TEST_P(Nodes, ReduceReportsASiblingsMessage) {
  ChunkRun run(small_setup(), library());
  run.until_reduce();
  Siblings siblings(run);
  siblings.received.data()[siblings.messages[1].offset + 32] ^= std::byte{1};  // the step
  run.reduce(0);
  const auto refused = static_cast<uint32_t>(WireStatus::kBadStep);
  EXPECT_EQ(siblings.verdicts, (std::vector<uint32_t>{0, refused}));
  EXPECT_EQ(run.findings.status, refused);
  EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kLocalScatter));
  EXPECT_EQ(run.findings.rank, 1u);
  siblings.expect_forward(run, refused);
  MessageHeader header;
  std::memcpy(&header, run.ranks[0].message.data(), sizeof(header));
  EXPECT_EQ(header.status, refused);
}

// What is undone is what was encoded: a sum that lies behind the messages, and not the bucket.
TEST_P(Nodes, DecodeUndoesWithTheSum) {
  for (const ScalarType dtype : kTypes) {
    SCOPED_TRACE(dtype_name(dtype));
    ChunkSetup setup = small_setup();
    setup.dtype = dtype;
    setup.alpha = 0.25f;
    setup.beta = 0.75f;
    setup.input_of_rank_0 = Input::kNonFinite;
    if (dtype == ScalarType::kFloat64) setup.codecs = {"exact"};
    ChunkRun run(setup, library()), host(setup);
    run.until_decode(), host.until_decode();
    run.sum_behind_messages(1);
    run.decode(1);
    host.decode(1);
    EXPECT_TRUE(run.ranks[1].worker == host.ranks[1].worker);
    EXPECT_TRUE(run.ranks[1].gradient == host.ranks[1].gradient);
  }
}

INSTANTIATE_TEST_SUITE_P(Libraries, Nodes, ::testing::ValuesIn(both_libraries()), library_name);

}  // namespace
}  // namespace gradferry::testing
