// The kernels of chunks: a chunk goes through all ranks, and every byte is compared with what
// tests/kernels/host_library.h gives.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "gradferry/error.h"
#include "tests/kernels/cuda/chunk_run.h"

namespace gradferry::testing {
namespace {

// By its name gpu-check finds it for compute-sanitizer.
TEST(Chunks, StayInsideEveryBufferOfAMixture) {
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

TEST(Chunks, OfFloat64AreOfExactAlone) {
  for (const Codec& codec : codecs()) {
    // NOLINTNEXTLINE(bugprone-invalid-enum-default-initialization): no message, no phase
    EncodeChunkCall call{};
    call.chunk.rows = 1u << row_of(codec);
    call.chunk.dtype = ScalarType::kFloat64;
    const auto encode = [&] { kernels_under_test().chunks.encode(call); };
    if (codec.supports_float64) {
      EXPECT_NO_THROW(encode());
    } else {
      EXPECT_THROW(encode(), Error) << codec.name;
    }
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

// Neighbouring tiles are in messages of different ranks, and ranks are more than shared memory has
// sums for.
TEST(Chunks, OfManyRanksAreSummedMessageByMessage) {
  ChunkSetup setup;
  setup.codecs = {"bf16"};
  setup.world_size = 67;
  setup.sizes.assign(68, 9);
  expect_bytes_of_the_host(ChunkRun(setup));
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

// What is wrong with a message of rank 1: a bit of the step in its header, a bit of its payload, or
// a payload that no encoder writes, under a right header.
enum class Damage { kStep, kPayload, kCorrupt };

WireStatus status_of(Damage damage) {
  return damage == Damage::kStep      ? WireStatus::kBadStep
         : damage == Damage::kPayload ? WireStatus::kBadChecksum
                                      : WireStatus::kCorruptPayload;
}

void apply(Damage damage, const ChunkRun& run, Buffer& buffer, const Message& message) {
  std::byte* start = buffer.data() + message.offset;
  if (damage == Damage::kStep) start[32] ^= std::byte{1};
  if (damage == Damage::kPayload) start[kHeaderBytes + 9] ^= std::byte{4};
  if (damage != Damage::kCorrupt) return;
  std::memset(start + kHeaderBytes, 0xff, message.payload_bytes);
  ChunkRun::seal(buffer, message, run.envelope(1, message.phase), 0);
}

// Corrupt tiles are those of the rank that has found them, if that has added them up.
void expect_found(const ChunkRun& run, Damage damage, Phase phase, uint64_t num_corrupt) {
  const bool corrupt = damage == Damage::kCorrupt;
  const auto status = static_cast<uint32_t>(status_of(damage));
  EXPECT_EQ(run.verdicts, (std::vector<uint32_t>{0, corrupt ? 0 : status, 0}));
  EXPECT_EQ(run.findings.status, status);
  EXPECT_EQ(run.findings.phase, static_cast<uint32_t>(phase));
  EXPECT_EQ(run.findings.rank, corrupt && phase == Phase::kScatter ? 0u : 1u);
  EXPECT_TRUE(!corrupt || run.findings.received == num_corrupt);
}

// Every second tile, from `first` on, is NaN on the rank; all else is as in `before`.
void expect_nan(const ChunkRun& run, uint32_t rank, size_t first, const Buffer& before) {
  const ScalarType dtype = run.setup.dtype;
  const uint32_t item = item_bytes(dtype);
  std::byte nan[sizeof(double)];
  write_number(dtype, double(NAN), nan);
  for (size_t i = 0; i < run.setup.sizes.size(); ++i) {
    for (uint32_t e = 0; e < run.setup.sizes[i]; ++e) {
      const size_t at = (run.decoded(i).tile.gradient_offset + e) * item;
      const std::byte* expected = i % 2 == first % 2 ? nan : before.data() + at;
      ASSERT_EQ(std::memcmp(run.ranks[rank].gradient.data() + at, expected, item), 0)
          << dtype_name(dtype) << " " << i << " " << e;
    }
  }
}

// Tiles are those of ranks 0 and 1, in turns; ids begin at 100.
TEST_P(DamagedChunks, AreNamedAndTheirTilesNaN) {
  for (const ScalarType dtype :
       {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16, ScalarType::kFloat64}) {
    for (const Damage damage : {Damage::kStep, Damage::kPayload, Damage::kCorrupt}) {
      const bool is_float64 = dtype == ScalarType::kFloat64;
      if (is_float64 && damage == Damage::kCorrupt) continue;  // `exact` takes all bytes
      SCOPED_TRACE(dtype_name(dtype) + " " + std::to_string(static_cast<int>(damage)));
      ChunkSetup setup = small_setup();
      setup.dtype = dtype;
      setup.bare = kAllTiles;
      setup.codecs = {is_float64 ? "exact" : "q4"};
      ChunkRun run(setup, library()), right(setup);
      run.until_decode(), right.until_decode();
      apply(damage, run, run.ranks[0].scattered, run.scattered(0, 1));
      run.reduce(0);
      expect_found(run, damage, Phase::kScatter, 2);
      MessageHeader header;
      std::memcpy(&header, run.ranks[0].message.data(), sizeof(header));
      EXPECT_EQ(header.status, static_cast<uint8_t>(status_of(damage)));
      EXPECT_EQ(header.phase, static_cast<uint8_t>(Phase::kGather));
      EXPECT_EQ(header.checksum,
                word_sum(run.ranks[0].message.data() + kHeaderBytes, header.payload_bytes));
      run.findings = {};
      run.accumulate(0);
      expect_found(run, damage, Phase::kScatter, 2);
      EXPECT_EQ(run.findings.nonfinite_tile, 101u);
      expect_nan(run, 0, 0, right.ranks[0].gradient);
      run.findings = {};
      apply(damage, run, run.ranks[2].gathered, run.gathered(1));
      run.decode(2), right.decode(2);
      expect_found(run, damage, Phase::kGather, 1);
      EXPECT_EQ(run.findings.nonfinite_tile, 102u);
      expect_nan(run, 2, 1, right.ranks[2].gradient);
    }
  }
}

// A rank that owns nothing checks what it gets, and changes nothing.
TEST_P(DamagedChunks, AreNamedByARankWithoutTiles) {
  ChunkRun run(small_setup(), library());
  run.until_reduce();
  const Buffer before = run.ranks[2].gradient;
  apply(Damage::kStep, run, run.ranks[2].scattered, run.scattered(2, 1));
  run.accumulate(2);
  expect_found(run, Damage::kStep, Phase::kScatter, 0);
  EXPECT_EQ(run.findings.nonfinite_tile, 0u);
  EXPECT_TRUE(run.ranks[2].gradient == before);
}

TEST_P(DamagedChunks, TheFirstFaultStaysUnlessItIsAnEcho) {
  ChunkRun run(small_setup(), library());
  run.until_reduce();
  Buffer& scattered = run.ranks[0].scattered;
  const auto expect = [&](WireStatus status, uint32_t rank, uint64_t expected, uint64_t received) {
    run.reduce(0);
    EXPECT_EQ(run.findings.status, static_cast<uint32_t>(status));
    EXPECT_EQ(run.findings.rank, rank);
    EXPECT_EQ(run.findings.step, kEnvelope.step);
    EXPECT_EQ(run.findings.chunk, kEnvelope.chunk);
    EXPECT_EQ(run.findings.expected, expected);
    EXPECT_EQ(run.findings.received, received);
  };
  ChunkRun::seal(scattered, run.scattered(0, 1), run.envelope(1, Phase::kScatter), 10);
  expect(WireStatus::kPeerTrouble, 1, 0, 10);
  apply(Damage::kStep, run, scattered, run.scattered(0, 2));
  expect(WireStatus::kBadStep, 2, kEnvelope.step, kEnvelope.step ^ 1);
  scattered.data()[run.scattered(0, 0).offset] ^= std::byte{1};
  expect(WireStatus::kBadStep, 2, kEnvelope.step, kEnvelope.step ^ 1);
  EXPECT_EQ(run.verdicts[0], static_cast<uint32_t>(WireStatus::kBadMagic));
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

INSTANTIATE_TEST_SUITE_P(Libraries, DamagedChunks, ::testing::ValuesIn(both_libraries()),
                         library_name);

}  // namespace
}  // namespace gradferry::testing
