// accumulate of every codec, its options, gradient dtypes and instruction sets, against its
// definition: decoded payloads added in rank order, multiplied by 1 / divisor, rounded once.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tests/kernels/codec_runner.h"
#include "tests/kernels/contract_cases.h"
#include "tests/kernels/inputs.h"

namespace gradferry::testing {
namespace {

// Whole tiles, one of them zero on all ranks, ends within blocks, groups and vectors.
const std::vector<uint32_t> kSizes = {4096, 4096, 2048, 1030, 47, 1};
constexpr size_t kZerosBegin = 4096, kZerosEnd = 8192;

class Accumulate : public ContractTest {
 protected:
  Buffer sent(const Runner& run, Input input, uint64_t rank) const {
    std::vector<double> x = make_input(input, run.num_elements(), rank);
    // So that fp16 has large numbers, too, of which only sums are infinite.
    const bool too_large = input == Input::kHuge && GetParam().dtype == ScalarType::kFloat16;
    for (double& number : x) number *= too_large ? 65504.0 / FLT_MAX : 1.0;
    for (size_t i = kZerosBegin; i < kZerosEnd; ++i) x[i] = i % 3 == 0 ? -0.0 : 0.0;
    return run.encode(Isa::kScalar, run.gradient_from(x), Buffer()).payload;
  }

  // What accumulate must give, from scalar decode.
  Result expected(const CallSetup& s, const std::vector<Buffer>& payloads, uint32_t divisor) const {
    const Runner run(s);
    Result result{Buffer(), run.new_gradient(), Buffer(),
                  std::vector<TileStatus>(run.tiles().size(), TileStatus{0, 0})};
    std::vector<double> v;
    for (const Buffer& payload : payloads) {
      const std::vector<double> x = values(s, payload, Stage::kWorker);
      v.resize(x.size(), -0.0);  // adding -0 changes no number
      for (size_t i = 0; i < x.size(); ++i) v[i] = combine(1, v[i], 1, x[i]);
      const Result one = run.decode(Isa::kScalar, payload, Buffer(), Stage::kWorker);
      for (size_t tile = 0; tile < one.status.size(); ++tile) {
        result.status[tile].flags |= one.status[tile].flags & kTileCorrupt;
      }
    }
    const double inverse = is_float64() ? 1.0 / divisor : 1.0f / static_cast<float>(divisor);
    const uint32_t item = item_bytes(s.dtype);
    for (size_t tile = 0; tile < run.tiles().size(); ++tile) {
      const Tile& t = run.tiles()[tile];
      for (size_t i = t.gradient_offset; i < t.gradient_offset + t.num_elements; ++i) {
        std::byte* number = result.gradient.data() + i * item;
        write_number(s.dtype, combine(inverse, v[i], 1, -0.0), number);
        if (!std::isfinite(read_number(s.dtype, number))) {
          result.status[tile].flags |= kTileNonFinite;
        }
      }
    }
    return result;
  }

  void compare(const CallSetup& s, const std::vector<Buffer>& payloads) const {
    const Runner run(s);
    const auto world_size = static_cast<uint32_t>(payloads.size());
    for (const uint32_t divisor : std::set<uint32_t>{1, world_size}) {
      const Result wanted = expected(s, payloads, divisor);
      for (const Isa isa : available_isas()) {
        SCOPED_TRACE(std::string(isa_name(isa)) + ", ranks: " + std::to_string(world_size) +
                     ", divisor: " + std::to_string(divisor));
        const Result found = run.accumulate(isa, payloads, divisor);
        ASSERT_TRUE(found.gradient == wanted.gradient);
        ASSERT_TRUE(same_status(found.status, wanted.status));
      }
    }
    compare_with_reduce(s, payloads);
  }

 private:
  // Without loss reduce sends these numbers; else, but for held zero tiles, what encodes them.
  void compare_with_reduce(CallSetup s, const std::vector<Buffer>& payloads) const {
    if (parse_codec(s.codec).codec->lossy) s.hold_zero_tiles = false;
    const Runner run(s);
    const Result mean =
        run.accumulate(active_isa(), payloads, static_cast<uint32_t>(payloads.size()));
    const Buffer reduced = run.reduce(active_isa(), payloads, Buffer()).payload;
    if (!run.codec(active_isa()).lossy) {
      const Result decoded = run.decode(active_isa(), reduced, Buffer(), Stage::kOwner);
      ASSERT_TRUE(mean.gradient == decoded.gradient);
      ASSERT_TRUE(same_status(mean.status, decoded.status));
    } else if (s.dtype == ScalarType::kFloat32 &&
               run.payload_bytes(4096, Stage::kWorker) == run.payload_bytes(4096, Stage::kOwner)) {
      ASSERT_TRUE(run.encode(active_isa(), mean.gradient, Buffer()).payload == reduced);
    }
  }
};

TEST_P(Accumulate, IsTheSumInRankOrderRoundedOnce) {
  for (const Input input : kInputs) {
    SCOPED_TRACE("input " + std::to_string(static_cast<int>(input)));
    CallSetup s = setup(kSizes);
    s.misaligned = static_cast<int>(input) % 2 == 1;
    s.hold_zero_tiles = static_cast<int>(input) % 4 >= 2;
    std::vector<Buffer> payloads;
    for (uint32_t rank = 0; rank < 5; ++rank) {
      payloads.push_back(sent(Runner(s), input, 100 + rank));
      if (rank != 3) compare(s, payloads);
    }
  }
}

TEST_P(Accumulate, IsInRankOrderForMoreRanksThanAreSummedAtOnce) {
  const CallSetup s = setup({4096, 4096, 77});
  std::vector<Buffer> payloads;
  for (uint32_t rank = 0; rank < 33; ++rank) {
    payloads.push_back(sent(Runner(s), Input::kWideRange, 200 + rank));
    if (rank == 8 || rank == 24 || rank == 32) compare(s, payloads);
  }
}

TEST_P(Accumulate, OfZeroTilesIsPlusZero) {
  CallSetup s = setup(kSizes);
  s.hold_zero_tiles = true;
  const Runner run(s);
  const Buffer payload = sent(run, Input::kGaussian, 1);
  const uint32_t item = item_bytes(s.dtype);
  for (const Isa isa : available_isas()) {
    const Result sum = run.accumulate(isa, {payload, payload, payload}, 3);
    for (size_t i = kZerosBegin * item; i < kZerosEnd * item; ++i) {
      ASSERT_EQ(sum.gradient.data()[i], std::byte(0));
    }
    EXPECT_EQ(sum.status[1].flags, 0u);
    EXPECT_EQ(sum.status[1].checksum, 0u);
  }
}

// Nothing but noise from a rank: most of it breaks the format, some of it is numbers.
TEST_P(Accumulate, OfBytesThatNoEncoderWrote) {
  const CallSetup s = setup(kSizes);
  std::mt19937_64 random(9);
  for (uint32_t turn = 0; turn < 16; ++turn) {
    std::vector<Buffer> payloads;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      payloads.push_back(sent(Runner(s), Input::kGaussian, 300 + rank));
    }
    Buffer& noise = payloads[turn % 3];
    for (uint32_t i = 0; i < 1u << turn && i < noise.size(); ++i) {
      noise.data()[random() % noise.size()] = std::byte(random() & 255);
    }
    compare(s, payloads);
  }
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, Accumulate, ::testing::ValuesIn(all_cases()), case_name);

}  // namespace
}  // namespace gradferry::testing
