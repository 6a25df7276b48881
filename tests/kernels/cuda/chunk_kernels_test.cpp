// The kernels of chunks: a chunk goes through all ranks, and every byte is compared with what
// tests/kernels/host_library.h gives.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/kernels/cuda/chunk_run.h"

namespace gradferry::testing {
namespace {

TEST(Chunks, GiveTheBytesOfTheHost) {
  ChunkSetup setup;
  setup.gain = 0.5f;
  expect_bytes_of_the_host(ChunkRun(setup));
}

TEST(Chunks, HoldEveryCodecBesideExact) {
  for (const Codec& codec : cpu_codecs(Isa::kScalar)) {
    for (const ScalarType dtype :
         {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16}) {
      SCOPED_TRACE(std::string(codec.name) + " " + dtype_name(dtype));
      ChunkSetup setup;
      setup.codecs = {std::string(codec.name), "exact"};
      setup.dtype = dtype;
      setup.sizes = kFewSizes;
      setup.world_size = 2;
      // Rank 0 makes elements of all ranks non-finite, which the others undo.
      setup.input_of_rank_0 = Input::kNonFinite;
      setup.alpha = 0.25f;
      setup.beta = 0.75f;
      expect_bytes_of_the_host(ChunkRun(setup));
    }
  }
}

TEST(Chunks, HoldEveryMixture) {
  ChunkSetup setup;
  setup.codecs = all_codecs();
  setup.sizes.clear();
  for (size_t i = 0; i < 2 * setup.codecs.size(); ++i) {
    setup.sizes.push_back(i % 4 == 0 ? 4096u : static_cast<uint32_t>(1000 + 37 * i));
  }
  for (const ScalarType dtype :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16}) {
    SCOPED_TRACE(dtype_name(dtype));
    setup.dtype = dtype;
    setup.input_of_rank_0 = dtype == ScalarType::kFloat32 ? Input::kNonFinite : Input::kHeavyTail;
    expect_bytes_of_the_host(ChunkRun(setup));
  }
}

TEST(Chunks, HoldFloat64) {
  for (const Input input : {Input::kGaussian, Input::kNonFinite, Input::kSparse}) {
    ChunkSetup setup;
    setup.codecs = {"exact"};
    setup.dtype = ScalarType::kFloat64;
    setup.input_of_rank_0 = input;
    setup.beta = 0.9f;
    expect_bytes_of_the_host(ChunkRun(setup));
  }
}

// Momentum in a world of one: what was encoded is decoded where it lies, and has no header.
TEST(Chunks, WithoutMessagesAreOnlyEncodedAndDecoded) {
  ChunkSetup setup;
  setup.codecs = {"exact"};
  setup.world_size = 1;
  setup.alpha = 0.25f;
  setup.beta = 0.75f;
  ChunkRun host(setup), kernels = by_kernels(host);
  kernels.encode(0, false), host.encode(0, false);
  expect_same(kernels, host);
  for (ChunkRun* run : {&kernels, &host}) {
    Rank& r = run->ranks[0];
    ASSERT_EQ(r.gathered.size(), r.sent.size());
    std::memcpy(r.gathered.data(), r.sent.data(), r.sent.size());
  }
  kernels.decode(0, false), host.decode(0, false);
  EXPECT_EQ(kernels.verdicts, std::vector<uint32_t>{77});  // untouched
  EXPECT_EQ(kernels.findings.nonfinite_tile, host.findings.nonfinite_tile);
  expect_same(kernels, host);
}

// Few and small, for sanitizers.
TEST(Chunks, StayInsideEveryBufferOfAMixture) {
  for (const std::vector<std::string>& codecs :
       {std::vector<std::string>{"q4", "exact"}, all_codecs()}) {
    ChunkSetup setup;
    setup.codecs = codecs;
    setup.world_size = 2;
    setup.sizes.clear();
    for (uint32_t i = 0; i < 2 * codecs.size(); ++i) setup.sizes.push_back(5 + 125 * (i % 3));
    expect_bytes_of_the_host(ChunkRun(setup));
  }
}

// --- what is wrong with messages -----------------------------------------------------------------

class DamagedChunks : public LibraryTest {};

// What an all-gather sends.
TEST_P(DamagedChunks, EncodeSealsThePhaseOfTheCall) {
  ChunkRun run(small_setup(), library());
  for (const Phase phase : {Phase::kScatter, Phase::kGather}) {
    run.sealed = phase;
    run.encode(1);
    MessageHeader header;
    std::memcpy(&header, run.ranks[1].sent.data(), sizeof(header));
    EXPECT_EQ(header.phase, static_cast<uint8_t>(phase));
  }
}

TEST_P(DamagedChunks, ReduceRefusesADamagedMessageAndStillSends) {
  ChunkRun run(small_setup(), library());
  for (uint32_t rank = 0; rank < 3; ++rank) run.encode(rank);
  run.scatter();
  run.ranks[0].scattered.data()[run.scattered(0, 1).offset + kHeaderBytes + 9] ^= std::byte{4};
  run.reduce(0);
  const auto refused = static_cast<uint32_t>(WireStatus::kBadChecksum);
  EXPECT_EQ(run.verdicts, (std::vector<uint32_t>{0, refused, 0}));
  EXPECT_EQ(run.findings.status, refused);
  EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kScatter));
  EXPECT_EQ(run.findings.rank, 1u);
  MessageHeader header;
  std::memcpy(&header, run.ranks[0].message.data(), sizeof(header));
  EXPECT_EQ(header.status, refused);
  EXPECT_EQ(header.phase, static_cast<uint8_t>(Phase::kGather));
  EXPECT_EQ(header.checksum,
            word_sum(run.ranks[0].message.data() + kHeaderBytes, header.payload_bytes));
}

// Scales that no encoder writes, in a message that is otherwise right.
void corrupt_tiles_of_rank_0(ChunkRun& run) {
  const Message message = run.scattered(0, 2);
  std::memset(run.ranks[0].scattered.data() + message.offset + kHeaderBytes, 0xff,
              message.payload_bytes);
  ChunkRun::seal(run.ranks[0].scattered, message, run.envelope(2, Phase::kScatter), 0);
}

void expect_both_counted(const ChunkRun& run) {
  EXPECT_EQ(run.verdicts, std::vector<uint32_t>(3, 0));
  EXPECT_EQ(run.findings.status, static_cast<uint32_t>(WireStatus::kCorruptPayload));
  EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kScatter));
  EXPECT_EQ(run.findings.rank, 0u);
  EXPECT_EQ(run.findings.received, 2u);  // tiles that rank 0 owns
}

TEST_P(DamagedChunks, ReduceCountsCorruptTiles) {
  ChunkSetup setup = small_setup();
  setup.codecs = {"q4"};
  ChunkRun run(setup, library());
  for (uint32_t rank = 0; rank < 3; ++rank) run.encode(rank);
  run.scatter();
  corrupt_tiles_of_rank_0(run);
  run.reduce(0);
  expect_both_counted(run);
}

// Neither the numbers of other owners change nor, beyond a header, those of a rank that owns none.
TEST_P(DamagedChunks, AccumulateMakesAllTilesNaNWhereAMessageIsRefused) {
  for (const ScalarType dtype :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16, ScalarType::kFloat64}) {
    ChunkSetup setup = small_setup();
    setup.dtype = dtype;
    if (dtype == ScalarType::kFloat64) setup.codecs = {"exact"};
    ChunkRun run(setup, library());
    run.until_reduce();
    const Buffer before = run.ranks[0].gradient;
    for (const uint32_t owner : {0u, 2u}) {  // all tiles are those of ranks 0 and 1, in turns
      run.findings = {};
      const size_t damaged = owner == 0 ? kHeaderBytes + 9 : 32;  // a payload; the step
      run.ranks[owner].scattered.data()[run.scattered(owner, 1).offset + damaged] ^= std::byte{4};
      run.accumulate(owner);
      const auto refused =
          static_cast<uint32_t>(owner == 0 ? WireStatus::kBadChecksum : WireStatus::kBadStep);
      EXPECT_EQ(run.verdicts, (std::vector<uint32_t>{0, refused, 0}));
      EXPECT_EQ(run.findings.status, refused);
      EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kScatter));
      EXPECT_EQ(run.findings.rank, 1u);
      EXPECT_EQ(run.findings.nonfinite_tile, owner == 0 ? 101u : 0u);  // ids begin at 100
    }
    const uint32_t item = item_bytes(dtype);
    std::byte nan[sizeof(double)];
    write_number(dtype, double(NAN), nan);
    for (size_t i = 0; i < setup.sizes.size(); ++i) {
      for (uint32_t e = 0; e < setup.sizes[i]; ++e) {
        const size_t at = (run.decoded(i).tile.gradient_offset + e) * item;
        const std::byte* expected = i % 2 == 0 ? nan : before.data() + at;
        ASSERT_EQ(std::memcmp(run.ranks[0].gradient.data() + at, expected, item), 0)
            << dtype_name(dtype) << " " << i << " " << e;
      }
    }
  }
}

TEST_P(DamagedChunks, AccumulateCountsCorruptTiles) {
  ChunkSetup setup = small_setup();
  setup.codecs = {"q4"};
  ChunkRun run(setup, library());
  run.until_reduce();
  corrupt_tiles_of_rank_0(run);
  run.accumulate(0);
  expect_both_counted(run);
  EXPECT_EQ(run.findings.nonfinite_tile, 101u);
}

TEST_P(DamagedChunks, AccumulateNotesTheFirstTileThatIsNotFinite) {
  ChunkSetup setup = small_setup();
  setup.codecs = {"exact"};
  ChunkRun run(setup, library());
  std::vector<double> values(run.num_elements(), 1.0);
  values[run.decoded(2).tile.gradient_offset + 5] = INFINITY;
  values[run.decoded(3).tile.gradient_offset] = NAN;
  run.set_gradient(1, values);
  run.until_reduce();
  const std::vector<uint64_t> tiles = {102, 103, 0};  // by rank; the last one owns none
  for (const bool is_fault : {false, true}) {
    run.nonfinite_is_fault = is_fault;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      run.findings = {};
      run.accumulate(rank);
      const bool expected = is_fault && tiles[rank] != 0;
      EXPECT_EQ(run.findings.nonfinite_tile, tiles[rank] == 0 ? 0 : tiles[rank] + 1);
      EXPECT_EQ(run.findings.status,
                static_cast<uint32_t>(expected ? WireStatus::kNonFiniteMean : WireStatus::kOk));
      EXPECT_EQ(run.findings.rank, expected ? rank : 0);
      EXPECT_EQ(run.findings.received, expected ? tiles[rank] : 0);
    }
  }
}

TEST_P(DamagedChunks, DecodeMakesTilesOfRefusedMessagesNaN) {
  for (const ScalarType dtype :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16, ScalarType::kFloat64}) {
    ChunkSetup setup = small_setup();
    setup.dtype = dtype;
    setup.bare = kAllTiles;
    if (dtype == ScalarType::kFloat64) setup.codecs = {"exact"};
    ChunkRun run(setup, library()), host(setup);
    run.until_decode(), host.until_decode();
    host.decode(1);
    run.ranks[1].gathered.data()[run.gathered(0).offset + 32] ^= std::byte{1};  // the step
    run.decode(1);
    const auto refused = static_cast<uint32_t>(WireStatus::kBadStep);
    EXPECT_EQ(run.verdicts, (std::vector<uint32_t>{refused, 0, 0}));
    EXPECT_EQ(run.findings.status, refused);
    EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kGather));
    EXPECT_EQ(run.findings.rank, 0u);
    EXPECT_EQ(run.findings.nonfinite_tile, 101u);  // the first tile, whose id is 100
    const uint32_t item = item_bytes(dtype);
    for (size_t i = 0; i < setup.sizes.size(); ++i) {
      const ChunkTile& entry = run.decoded(i);
      for (uint32_t e = 0; e < setup.sizes[i]; ++e) {
        const size_t at = (entry.tile.gradient_offset + e) * item;
        if (entry.message == 0) {
          const double value = read_number(dtype, run.ranks[1].gradient.data() + at);
          ASSERT_TRUE(std::isnan(value)) << i << " " << e;
        } else {
          ASSERT_EQ(std::memcmp(run.ranks[1].gradient.data() + at,
                                host.ranks[1].gradient.data() + at, item),
                    0);
        }
      }
    }
  }
}

TEST_P(DamagedChunks, DecodeNotesTheFirstCorruptTile) {
  ChunkSetup setup = small_setup();
  setup.codecs = {"q4"};
  setup.bare = kAllTiles;
  ChunkRun run(setup, library());
  run.until_decode();
  const Message message = run.gathered(1);
  Buffer& gathered = run.ranks[2].gathered;
  std::memset(gathered.data() + message.offset + kHeaderBytes, 0xff, message.payload_bytes);
  ChunkRun::seal(gathered, message, run.envelope(1, Phase::kGather), 0);
  run.decode(2);
  EXPECT_EQ(run.verdicts, std::vector<uint32_t>(3, 0));
  EXPECT_EQ(run.findings.status, static_cast<uint32_t>(WireStatus::kCorruptPayload));
  EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(Phase::kGather));
  EXPECT_EQ(run.findings.rank, 1u);
  EXPECT_EQ(run.findings.received, 1u);
  EXPECT_EQ(run.findings.nonfinite_tile, 102u);  // the second tile
}

INSTANTIATE_TEST_SUITE_P(Libraries, DamagedChunks, ::testing::ValuesIn(both_libraries()),
                         library_name);

}  // namespace
}  // namespace gradferry::testing
