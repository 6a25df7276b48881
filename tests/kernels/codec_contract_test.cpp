// What every codec promises (codec_laws.h), for every codec of the table, its options, gradient
// dtype and instruction set.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/kernels/codec_laws.h"
#include "tests/kernels/contract_cases.h"
#include "tests/kernels/inputs.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gradferry::testing {
namespace {

class CodecContract : public ContractTest {};

// Every call once, with gradients and residuals of one kind of numbers.
void expect_laws(const CallSetup& setup, Input input) {
  const Laws laws(setup);
  const Runner& run = laws.run();
  const size_t n = run.num_elements();
  const Buffer gradient = run.gradient_from(make_input(input, n, 1));
  const Buffer residual = run.residual_from(make_residual(input, n, 3));
  const Buffer sent = laws.encode(gradient, residual).payload;
  const Buffer plain = laws.encode(run.gradient_from(make_input(input, n, 2)), Buffer()).payload;
  const Buffer reduced = laws.reduce({sent, plain, sent}, residual).payload;
  laws.reduce({sent, plain, sent}, Buffer());
  laws.accumulate({sent, plain, sent}, 3);
  laws.decode(plain, Buffer(), Stage::kWorker);
  laws.decode(reduced, residual, Stage::kOwner);
  // Of another rank, whose numbers are not finite in a part of the tiles.
  std::vector<double> lost(n, 1.0);
  for (size_t i = 0; i < n; i += 700) lost[i] = i % 1400 == 0 ? double(NAN) : double(INFINITY);
  const Buffer other = run.encode(Isa::kScalar, run.gradient_from(lost), Buffer()).payload;
  const Buffer in = run.reduce(Isa::kScalar, {other}, Buffer()).payload;
  laws.undo(sent, in, gradient, residual);
}

// With every second size: each meets four inputs.
TEST_P(CodecContract, HoldsWhateverTheNumbers) {
  const std::vector<uint32_t> all = edge_sizes();
  for (const Input input : kInputs) {
    const auto index = static_cast<uint32_t>(input);
    SCOPED_TRACE("input " + std::to_string(index));
    std::vector<uint32_t> sizes;
    for (size_t i = index % 2; i < all.size(); i += 2) sizes.push_back(all[i]);
    CallSetup s = setup(sizes);
    s.misaligned = index / 2 % 2 == 1;
    s.alpha = s.misaligned ? 0.1f : 1.0f;
    s.gain = s.misaligned ? 0.5f : 1.0f;
    s.beta = 0.9f;
    s.hold_zero_tiles = s.misaligned;
    expect_laws(s, input);
  }
}

// Every buffer is exactly as long as it must be.
TEST_P(CodecContract, HoldsForASingleTile) {
  for (const uint32_t n : edge_sizes()) {
    CallSetup s = setup({n});
    s.misaligned = n % 2 == 1;
    s.beta = 0.5f;
    expect_laws(s, Input::kGaussian);
  }
}

TEST_P(CodecContract, PayloadSizesAreAlignedAndGrowWithTheTile) {
  const Runner run(setup({1}));
  for (const Stage stage : {Stage::kWorker, Stage::kOwner}) {
    uint32_t last = 0;
    for (uint32_t n = 1; n <= kTileElements; ++n) {
      const uint32_t bytes = run.payload_bytes(n, stage);
      ASSERT_EQ(bytes % kPayloadAlignment, 0u);
      ASSERT_GE(bytes, last);
      last = bytes;
    }
  }
}

TEST_P(CodecContract, HoldsForEveryBitPatternOfSixteenBitGradients) {
  if (item_bytes(GetParam().dtype) != 2) GTEST_SKIP() << "only for 16-bit gradients";
  const Laws laws(setup(std::vector<uint32_t>(16, 4096)));
  Buffer gradient = laws.run().new_gradient();
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto pattern = static_cast<uint16_t>(i);
    std::memcpy(gradient.data() + 2 * i, &pattern, 2);
  }
  const Result sent = laws.encode(gradient, Buffer());
  const Result back = laws.decode(sent.payload, Buffer(), Stage::kWorker);
  if (laws.run().codec(Isa::kScalar).lossy) return;
  EXPECT_TRUE(back.gradient ==
              laws.run().gradient_from(numbers(GetParam().dtype, gradient)));  // NaNs canonical
}

// Tiles that are zero, but for the last element of one; and residuals that are not replaced, in a
// zero tile or in a unit that is not finite, which is everywhere here, whatever the codec's unit
// is.
TEST_P(CodecContract, HoldsZeroTilesAndKeepsResidualsInTheNewUnits) {
  for (const double number : {0.0, double(INFINITY)}) {
    for (const float gain : {0.5f, 2.0f}) {
      CallSetup s = setup({4096, 50, 1024, 7});
      s.hold_zero_tiles = true;
      s.gain = gain;
      const Laws laws(s);
      const size_t n = laws.run().num_elements();
      std::vector<double> numbers(n, number);
      for (size_t i = 0; i < n; i += 3) numbers[i] = -number;
      numbers[4096 + 49] = 0.125;
      const Buffer residual = Runner::residual_from(residual_beyond(gain, n, 73));
      const Buffer sent = laws.encode(laws.run().gradient_from(numbers), residual).payload;
      laws.reduce({sent, sent}, residual);
    }
  }
}

TEST_P(CodecContract, ZeroTileSendsItsResidualInMomentumMode) {
  const Runner run(setup({4096}));
  const Buffer gradient = run.gradient_from(std::vector<double>(4096, 0.0));
  const std::vector<float> old(4096, 0.5f);
  const Result encoded = run.encode(active_isa(), gradient, run.residual_from(old));
  EXPECT_NE(encoded.payload.as<uint32_t>(), std::vector<uint32_t>(encoded.payload.size() / 4, 0));
}

// --- sums over ranks -----------------------------------------------------------------------------

// Whole tiles, one of them zero on all ranks, ends within blocks, groups and vectors.
const std::vector<uint32_t> kSizes = {4096, 4096, 2048, 1030, 47, 5};
constexpr size_t kZerosBegin = 4096, kZerosEnd = 8192;

class RankSums : public ContractTest {
 protected:
  RankSums() : laws_(setup(kSizes)) {}

  std::vector<double> numbers(Input input, uint64_t seed) const {
    std::vector<double> result = make_input(input, laws_.run().num_elements(), seed);
    // So that fp16 has large numbers, too, of which only sums are infinite.
    if (input == Input::kHuge && GetParam().dtype == ScalarType::kFloat16) {
      for (double& x : result) x *= 65504.0 / FLT_MAX;
    }
    for (size_t i = kZerosBegin; i < kZerosEnd; ++i) result[i] = i % 3 == 0 ? -0.0 : 0.0;
    return result;
  }
  void add_rank(const std::vector<double>& numbers) {
    const Buffer gradient = laws_.run().gradient_from(numbers);
    payloads_.push_back(laws_.run().encode(Isa::kScalar, gradient, Buffer()).payload);
  }
  // Every seventh element of the residual -0, the next one subnormal, most of the zero tile zero.
  void expect_sums(Input input) const {
    std::vector<float> residual = make_residual(input, laws_.run().num_elements(), 200);
    for (size_t i = 0; i + 1 < residual.size(); i += 7) {
      residual[i] = -0.0f;
      residual[i + 1] = -0x1p-140f;
    }
    for (size_t i = kZerosBegin + 50; i < kZerosEnd; ++i) residual[i] = i % 2 == 0 ? 0.0f : -0.0f;
    SCOPED_TRACE("ranks: " + std::to_string(payloads_.size()));
    if (item_bytes(GetParam().dtype) != 2) {  // what is reduced has no dtype, but with `exact`
      laws_.reduce(payloads_, Runner::residual_from(residual));
      laws_.reduce(payloads_, Buffer());
    }
    laws_.accumulate(payloads_, static_cast<uint32_t>(payloads_.size()));
    laws_.accumulate(payloads_, 1);
  }

  const Laws laws_;
  std::vector<Buffer> payloads_;
};

TEST_P(RankSums, AreInRankOrder) {
  for (const Input input : kInputs) {
    SCOPED_TRACE("input " + std::to_string(static_cast<int>(input)));
    payloads_.clear();
    for (const uint32_t world_size : {1u, 2u, 5u, 8u}) {
      while (payloads_.size() < world_size) add_rank(numbers(input, 100 + payloads_.size()));
      expect_sums(input);
    }
  }
}

// Ranks whose numbers cancel, and whose scales lie further and further apart.
TEST_P(RankSums, AreInRankOrderWhereNumbersCancel) {
  for (const double step : {1.0, 1.9, 30.0, 1e4}) {
    payloads_.clear();
    double factor = 1;
    for (uint32_t rank = 0; rank < 4; ++rank, factor *= -step) {
      std::vector<double> x = numbers(Input::kGaussian, 300);
      for (double& number : x) number *= factor;
      add_rank(x);
    }
    expect_sums(Input::kSparse);
  }
}

// Two thirds of the ranks reach infinity before the last third would take them back: by numbers
// that are large all over, and by single ones, which a transform spreads.
TEST_P(RankSums, AreInRankOrderWhereTheyOverflowOnTheWay) {
  for (const auto& [world_size, stride, magnitude] :
       {std::tuple(3u, 1u, 0.75 * FLT_MAX), std::tuple(12u, 128u, 1.1 * 0x1p125)}) {
    payloads_.clear();
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      std::vector<double> x = numbers(Input::kGaussian, 900);
      for (size_t i = 0; i < kZerosBegin; ++i) {
        x[i] = magnitude * (i % stride == 0 ? 1 : 20 * x[i]);
        if (3 * rank >= 2 * world_size) x[i] = -x[i];
      }
      add_rank(x);
    }
    expect_sums(Input::kTiny);
  }
}

TEST_P(RankSums, AreInRankOrderForMoreRanksThanAreSummedAtOnce) {
  for (const uint32_t world_size : {24u, 25u, 33u}) {
    while (payloads_.size() < world_size) {
      add_rank(numbers(Input::kWideRange, 500 + payloads_.size()));
    }
    expect_sums(Input::kGaussian);
  }
}

// --- how a codec is called -----------------------------------------------------------------------

#if defined(__x86_64__)
TEST_P(CodecContract, CallersFlushToZeroChangesNothingAndComesBack) {
  CallSetup s = setup({4096, 100});
  s.alpha = 0.3f;
  s.beta = 0.5f;
  const Runner run(s);
  const size_t n = run.num_elements();
  std::vector<double> input = make_input(Input::kTiny, n, 81);
  for (size_t i = 0; i < n; i += 40) input[i] = 3e-38;
  const Buffer gradient = run.gradient_from(input);
  const Buffer residual = run.residual_from(make_residual(Input::kTiny, n, 82));
  std::vector<double> lost(n, 0.0);
  for (size_t i = 0; i < n; i += 7) lost[i] = double(NAN);
  const Buffer sent = run.encode(Isa::kScalar, run.gradient_from(lost), Buffer()).payload;
  const Buffer nothing = run.reduce(Isa::kScalar, {sent}, Buffer()).payload;
  for (const Isa isa : available_isas()) {
    const Buffer payload = run.encode(isa, gradient, residual).payload;
    const std::vector<Buffer> three = {payload, payload, payload};
    const Buffer reduced = run.reduce(isa, three, residual).payload;
    const auto all = [&] {
      return std::vector<Result>{
          run.encode(isa, gradient, residual), run.reduce(isa, three, residual),
          run.decode(isa, reduced, residual, Stage::kOwner),
          run.undo(isa, payload, nothing, gradient, residual), run.accumulate(isa, three, 3)};
    };
    const std::vector<Result> before = all();
    const uint32_t saved = _mm_getcsr();
    // Flush to zero, denormals are zero, round toward zero, all exceptions masked.
    const uint32_t hostile = 0x8040u | 0x6000u | 0x1f80u;
    _mm_setcsr(hostile);
    const std::vector<Result> under = all();
    const uint32_t after = _mm_getcsr();
    _mm_setcsr(saved);
    EXPECT_EQ(after, hostile);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_result(before[i], under[i])) << i;
  }
}
#endif

TEST_P(CodecContract, EmptyBatchAndMissingStatusAreFine) {
  const Runner empty(setup({}));
  const CallSetup s = setup({100});
  const Runner run(s);
  const Buffer gradient = run.gradient_from(make_input(Input::kGaussian, 100, 1));
  for (const Isa isa : available_isas()) {
    empty.encode(isa, empty.new_gradient(), Buffer());
    empty.accumulate(isa, {Buffer()}, 1);
    Buffer payload(run.payload_bytes(100, Stage::kWorker));
    const TileBatch batch{
        run.tiles().data(), 1,      GetParam().dtype, Stage::kWorker, false, s.seed, s.step,
        &run.options(),     nullptr};
    run.codec(isa).encode(batch, gradient.data(), 1.0f, nullptr, nullptr, payload.data());
    EXPECT_TRUE(payload == run.encode(isa, gradient, Buffer()).payload);
    Buffer sum = run.new_gradient();
    const std::byte* const payloads[] = {payload.data()};
    run.codec(isa).accumulate(batch, payloads, 1, 1, sum.data());
    EXPECT_TRUE(sum == run.decode(isa, payload, Buffer(), Stage::kWorker).gradient);
  }
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, CodecContract, ::testing::ValuesIn(all_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(AllCodecs, RankSums, ::testing::ValuesIn(all_cases()), case_name);

}  // namespace
}  // namespace gradferry::testing
