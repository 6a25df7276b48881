// Every CUDA kernel, run by the emulator or by a GPU, gives the bytes of the CPU codec: payloads,
// gradients, residuals, statuses.
#include <gtest/gtest.h>

#include <random>

#include "tests/cpp/contract_cases.h"
#include "tests/cpp/inputs.h"
#include "tests/simt/kernel_codecs.h"

namespace gradferry::testing {
namespace {

// Runs a codec's kernels, whatever instruction set is asked for.
class KernelRunner : public Runner {
 public:
  using Runner::Runner;
  const Codec& codec(Isa isa) const override { return *find_kernels(Runner::codec(isa).name); }
};

std::vector<Case> kernel_cases() {
  std::vector<Case> cases;
  for (Case& c : all_cases()) {
    if (find_kernels(c.codec.substr(0, c.codec.find(':'))) != nullptr) cases.push_back(c);
  }
  return cases;
}

void expect_same(const Result& cpu, const Result& kernels, const char* what) {
  EXPECT_TRUE(cpu.payload == kernels.payload) << what << ": payloads differ";
  EXPECT_TRUE(cpu.gradient == kernels.gradient) << what << ": gradients differ";
  EXPECT_TRUE(cpu.residual == kernels.residual) << what << ": residuals differ";
  EXPECT_TRUE(same_status(cpu.status, kernels.status)) << what << ": statuses differ";
}

class Kernels : public ContractTest {
 protected:
  static constexpr Isa kIsa = Isa::kScalar;

  // All functions on all inputs' kind `input`, both ways.
  void compare_all(const CallSetup& s, Input input) const {
    const Runner cpu(s);
    const KernelRunner kernels(s);
    const size_t n = cpu.num_elements();
    const Buffer gradient = cpu.gradient_from(make_input(input, n, 1));
    const Buffer other = cpu.gradient_from(make_input(input, n, 2));
    const Buffer residual = cpu.residual_from(make_residual(input, n, 3));

    const Result encoded = cpu.encode(kIsa, gradient, residual);
    // Another fill: a byte that is not written would differ.
    expect_same(encoded, kernels.encode(kIsa, gradient, residual, 0x3c), "encode");
    const Result plain = cpu.encode(kIsa, other, Buffer());
    expect_same(plain, kernels.encode(kIsa, other, Buffer(), 0x3c), "encode without residual");

    const std::vector<Buffer> payloads = {encoded.payload, plain.payload, encoded.payload};
    const Result reduced = cpu.reduce(kIsa, payloads, residual);
    expect_same(reduced, kernels.reduce(kIsa, payloads, residual), "reduce");
    expect_same(cpu.reduce(kIsa, {plain.payload}, Buffer()),
                kernels.reduce(kIsa, {plain.payload}, Buffer()), "reduce without residual");
    for (const uint32_t divisor : {1u, 3u}) {
      expect_same(cpu.accumulate(kIsa, payloads, divisor),
                  kernels.accumulate(kIsa, payloads, divisor), "accumulate");
    }
    for (const Buffer& r : {residual, Buffer()}) {
      expect_same(cpu.decode(kIsa, reduced.payload, r, Stage::kOwner),
                  kernels.decode(kIsa, reduced.payload, r, Stage::kOwner), "decode");
    }
    for (const bool with_status : {true, false}) {
      expect_same(
          cpu.undo(kIsa, encoded.payload, reduced.payload, gradient, residual, with_status),
          kernels.undo(kIsa, encoded.payload, reduced.payload, gradient, residual, with_status),
          "undo");
    }
  }
};

// Under a sanitizer a tile takes a hundred times as long: fewer of them, of every kind.
#if defined(SIMT_SANITIZED)
constexpr bool kFewTiles = true;
#else
constexpr bool kFewTiles = false;
#endif

// The emulator takes every fourth of the contract's sizes, some of every kind; a GPU takes them
// all.
#if defined(GRADFERRY_SIMT)
constexpr uint32_t kSizeStride = 4;
#else
constexpr uint32_t kSizeStride = 1;
#endif

// The contract's sizes in strides, and whole tiles. Or of few tiles: a whole one, a ragged one, one
// of about a block, a tiny one.
std::vector<uint32_t> some_sizes(uint32_t index) {
  if (kFewTiles) {
    constexpr uint32_t kRagged[] = {4095, 1025, 3000, 2047, 1023, 4080, 515, 1500};
    constexpr uint32_t kBlocks[] = {31, 33, 127, 129, 128, 130, 32, 100};
    return {kTileElements, kRagged[index], kBlocks[index], 1 + index};
  }
  const std::vector<uint32_t> all = edge_sizes();
  std::vector<uint32_t> sizes = {kTileElements, kTileElements};
  for (size_t i = index % kSizeStride; i < all.size(); i += kSizeStride) sizes.push_back(all[i]);
  return sizes;
}

// Each input under a seed of its own, five in all; half of them at misaligned gradients. In the
// emulator every size meets two inputs.
TEST_P(Kernels, GiveTheBytesOfTheCpu) {
  for (const Input input : kInputs) {
    const auto index = static_cast<uint32_t>(input);
    set_schedule(1 + index % 5);
    CallSetup s = setup(some_sizes(index));
    s.misaligned = index % 2 == 1;
    s.alpha = s.misaligned ? 0.1f : 1.0f;
    s.gain = s.misaligned ? 0.5f : 1.0f;
    s.beta = 0.9f;
    s.hold_zero_tiles = index % 4 >= 2;
    SCOPED_TRACE("input " + std::to_string(index));
    compare_all(s, input);
  }
}

TEST_P(Kernels, GiveTheBytesOfTheCpuUnderEverySeed) {
  for (uint64_t seed = 1; seed <= (kFewTiles ? 2 : 5); ++seed) {
    set_schedule(seed);
    CallSetup s =
        setup(kFewTiles ? std::vector<uint32_t>{4096, 1025, 130, 2}
                        : std::vector<uint32_t>{4096, 4095, 1, 1025, 3000, 4096, 130, 33});
    s.misaligned = seed % 2 == 0;
    s.gain = 0.5f;
    SCOPED_TRACE("seed " + std::to_string(seed));
    compare_all(s, seed % 2 == 0 ? Input::kGaussian : Input::kHeavyTail);
  }
}

TEST_P(Kernels, SumRanksInOrder) {
  for (const uint32_t world_size : {1u, 2u, 9u, 20u}) {
    CallSetup s = setup({5, 4096, 1030});
    const Runner cpu(s);
    const KernelRunner kernels(s);
    const size_t n = cpu.num_elements();
    std::vector<Buffer> payloads;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      // Of three sizes far apart, so that a sum in another order is another one.
      const int exponent = (s.dtype == ScalarType::kFloat16 ? 7 : 20) * (int(rank % 3) - 1);
      std::vector<double> input = make_input(Input::kGaussian, n, 20 + rank);
      for (double& x : input) x = std::ldexp(x, exponent);
      payloads.push_back(cpu.encode(kIsa, cpu.gradient_from(input), Buffer()).payload);
    }
    const Buffer residual = cpu.residual_from(make_residual(Input::kGaussian, n, 30));
    expect_same(cpu.reduce(kIsa, payloads, residual), kernels.reduce(kIsa, payloads, residual),
                "reduce");
    expect_same(cpu.accumulate(kIsa, payloads, world_size),
                kernels.accumulate(kIsa, payloads, world_size), "accumulate");
  }
}

// A block's elements are added neighbours first: in any other tree the two small numbers, one at a
// time, are lost beside the large one, and the sum comes out on the other side of what a scale's
// rounding to 8 bits divides.
TEST_P(Kernels, SumElementsInTheStatedTree) {
  const CallSetup s = setup({4096, 1000});
  const Runner cpu(s);
  const KernelRunner kernels(s);
  std::vector<double> input(cpu.num_elements(), 0.0);
  for (size_t block = 0; 128 * (block + 1) <= input.size(); ++block) {
    const size_t stride = size_t{1} << (block % 6);
    double* x = input.data() + 128 * block;
    x[0] = 1.0, x[stride] = 0x1p-8, x[2 * stride] = 0x1p-24, x[3 * stride] = 0x1p-24;
  }
  const Buffer gradient = cpu.gradient_from(input);
  const Buffer zero = cpu.residual_from(std::vector<float>(input.size(), 0.0f));
  expect_same(cpu.encode(kIsa, gradient, zero), kernels.encode(kIsa, gradient, zero), "encode");
}

TEST_P(Kernels, StayInsideEveryBufferOfASingleTile) {
  for (const uint32_t n : {1u, 2u, 3u, 31u, 32u, 127u, 129u, 1000u, 1025u, 2047u, 4079u, 4096u}) {
    CallSetup s = setup({n});
    s.misaligned = n % 2 == 1;
    s.beta = 0.5f;
    compare_all(s, Input::kGaussian);
  }
}

TEST_P(Kernels, HoldZeroTilesAndKeepTheirResiduals) {
  CallSetup s = setup({4096, 50, 1024});
  s.hold_zero_tiles = true;
  const Runner cpu(s);
  const KernelRunner kernels(s);
  const size_t n = cpu.num_elements();
  std::vector<double> input(n, 0.0);
  for (size_t i = 0; i < n; i += 3) input[i] = -0.0;
  input[4096 + 49] = 0.125;  // the second tile is zero but for its last element
  const Buffer gradient = cpu.gradient_from(input);
  const Buffer residual = cpu.residual_from(make_residual(Input::kGaussian, n, 72));
  const Result encoded = cpu.encode(kIsa, gradient, residual);
  expect_same(encoded, kernels.encode(kIsa, gradient, residual), "encode");
  expect_same(cpu.encode(kIsa, gradient, Buffer()), kernels.encode(kIsa, gradient, Buffer()),
              "encode without residual");
  const std::vector<Buffer> payloads = {encoded.payload, encoded.payload};
  expect_same(cpu.reduce(kIsa, payloads, residual), kernels.reduce(kIsa, payloads, residual),
              "reduce");
}

// A residual that is not replaced is still converted to the present loss scale: in a unit that is
// not finite, in a held zero tile.
TEST_P(Kernels, ConvertTheResidualsTheyKeep) {
  for (const float gain : {0.5f, 2.0f}) {
    CallSetup s = setup({4096, 77, 4096, 130});
    s.hold_zero_tiles = true;
    s.gain = gain;
    const KernelRunner kernels(s);
    const size_t n = kernels.num_elements();
    std::vector<double> input(n, 0.0);
    for (size_t i = 0; i < 4096 + 77; ++i) input[i] = double(NAN);
    const std::vector<float> old = residual_beyond(gain, n, 5);
    const Buffer residual = kernels.residual_from(old);
    const Result encoded = kernels.encode(kIsa, kernels.gradient_from(input), residual);
    const Result reduced = kernels.reduce(kIsa, {encoded.payload}, residual);
    for (const Result* result : {&encoded, &reduced}) {
      const std::vector<float> kept = result->residual.as<float>();
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(float_bits(kept[i]), float_bits(kept_by(gain, old[i]))) << i;
      }
    }
  }
}

TEST_P(Kernels, TakeEveryBitPatternOfSixteenBitGradients) {
  if (item_bytes(GetParam().dtype) != 2) GTEST_SKIP() << "only for 16-bit gradients";
  const uint32_t stride = kFewTiles ? 15 : 1;
  const CallSetup s = setup(std::vector<uint32_t>(16 / stride, 4096));
  const Runner cpu(s);
  const KernelRunner kernels(s);
  Buffer gradient = cpu.new_gradient();
  for (uint32_t i = 0; i < cpu.num_elements(); ++i) {
    const auto pattern = static_cast<uint16_t>(stride * i);
    std::memcpy(gradient.data() + 2 * i, &pattern, 2);
  }
  const Result encoded = cpu.encode(kIsa, gradient, Buffer());
  expect_same(encoded, kernels.encode(kIsa, gradient, Buffer()), "encode");
  expect_same(cpu.decode(kIsa, encoded.payload, Buffer(), Stage::kWorker),
              kernels.decode(kIsa, encoded.payload, Buffer(), Stage::kWorker), "decode");
}

TEST_P(Kernels, JudgeRandomBytesAsTheCpuDoes) {
  CallSetup s = setup({4096, 33, 1023, 1});
  s.beta = 0.9f;
  const Runner cpu(s);
  const KernelRunner kernels(s);
  std::mt19937_64 random(5);
  const Buffer residual =
      cpu.residual_from(make_residual(Input::kGaussian, cpu.num_elements(), 92));
  Buffer payload = cpu.encode(kIsa, cpu.new_gradient(), Buffer()).payload;
  for (int round = 0; round < (kFewTiles ? 4 : 20); ++round) {
    // Every second time a few bytes only, so that some of the payload is what encoders write.
    const size_t step = round % 2 == 0 ? 1 : 97;
    if (step != 1) {
      payload = cpu.encode(kIsa,
                           cpu.gradient_from(make_input(Input::kHeavyTail, cpu.num_elements(),
                                                        static_cast<uint64_t>(round))),
                           Buffer())
                    .payload;
    }
    for (size_t i = random() % step; i < payload.size(); i += step) {
      payload.data()[i] = std::byte(random() & 255);
    }
    expect_same(cpu.reduce(kIsa, {payload, payload}, residual),
                kernels.reduce(kIsa, {payload, payload}, residual), "reduce");
    expect_same(cpu.accumulate(kIsa, {payload, payload}, 2),
                kernels.accumulate(kIsa, {payload, payload}, 2), "accumulate");
    expect_same(cpu.decode(kIsa, payload, residual, Stage::kWorker),
                kernels.decode(kIsa, payload, residual, Stage::kWorker), "decode");
  }
}

TEST_P(Kernels, DoWithoutTilesAndWithoutStatus) {
  const KernelRunner empty(setup({}));
  empty.encode(kIsa, empty.new_gradient(), Buffer());
  const CallSetup s = setup({100});
  const KernelRunner run(s);
  const Buffer gradient = run.gradient_from(make_input(Input::kGaussian, 100, 1));
  Buffer payload(run.payload_bytes(100, Stage::kWorker));
  const TileBatch batch{
      run.tiles().data(), 1,       GetParam().dtype, Stage::kWorker, false, s.seed, s.step,
      &run.options(),     nullptr, nullptr};
  run.codec(kIsa).encode(batch, gradient.data(), 1.0f, nullptr, nullptr, payload.data());
  EXPECT_TRUE(payload == run.encode(kIsa, gradient, Buffer()).payload);
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, Kernels, ::testing::ValuesIn(kernel_cases()), case_name);

}  // namespace
}  // namespace gradferry::testing
