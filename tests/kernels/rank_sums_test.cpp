// Sums over ranks of every codec, its options and every instruction set, against their definitions:
// decoded payloads added in rank order, and encoded again by the owner's reduce (here with a gain
// of 1, where codecs have sums of their own), or rounded once by accumulate.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>

#include "tests/kernels/codec_runner.h"
#include "tests/kernels/contract_cases.h"
#include "tests/kernels/inputs.h"

namespace gradferry::testing {
namespace {

// Whole tiles, one of them zero on all ranks, ends within blocks, groups and vectors.
const std::vector<uint32_t> kSizes = {4096, 4096, 2048, 1030, 47, 5};
constexpr size_t kZerosBegin = 4096, kZerosEnd = 8192;

// Bytes that no encoder wrote, 2^turn of them: most break the format, some are numbers.
void add_noise(Buffer& payload, uint32_t turn, std::mt19937_64& random) {
  for (uint32_t i = 0; i < 1u << turn && i < payload.size(); ++i) {
    payload.data()[random() % payload.size()] = std::byte(random() & 255);
  }
}

// --- reduce
// ---------------------------------------------------------------------------------------

class RankSums : public ContractTest {
 protected:
  RankSums() : run_(setup(kSizes)) {}

  // What reduce must give, from scalar decode and encode. Adding -0 changes no number: v is coded
  // as a gradient beside a residual of nothing but -0.
  Result expected(const std::vector<Buffer>& payloads, const std::vector<float>& old) const {
    const size_t n = run_.num_elements();
    std::vector<float> v(n);
    std::vector<uint32_t> corrupt(run_.tiles().size());
    for (size_t rank = 0; rank < payloads.size(); ++rank) {
      const Result decoded = run_.decode(Isa::kScalar, payloads[rank], Buffer(), Stage::kWorker);
      const std::vector<float> sent = decoded.gradient.as<float>();
      for (size_t i = 0; i < n; ++i) v[i] = rank == 0 ? sent[i] : v[i] + sent[i];
      for (size_t i = 0; i < corrupt.size(); ++i) {
        corrupt[i] |= decoded.status[i].flags & kTileCorrupt;
      }
    }
    const float inverse = 1.0f / static_cast<float>(payloads.size());
    for (size_t i = 0; i < n; ++i) v[i] = v[i] * inverse + old[i];
    Result result = encode_at_owner(v);
    // Where v is not finite its unit keeps what was there.
    const std::vector<float> sent =
        run_.decode(Isa::kScalar, result.payload, Buffer(), Stage::kOwner).gradient.as<float>();
    std::vector<float> residual = result.residual.as<float>();
    for (size_t i = 0; i < n; ++i) {
      if (!std::isfinite(sent[i])) residual[i] = old[i];
    }
    result.residual = Runner::residual_from(residual);
    for (size_t i = 0; i < corrupt.size(); ++i) result.status[i].flags |= corrupt[i];
    return result;
  }

  void compare(const std::vector<Buffer>& payloads, const std::vector<float>& old) const {
    const Result wanted = expected(payloads, old);
    const Buffer mean = expected(payloads, std::vector<float>(old.size(), -0.0f)).payload;
    for (const Isa isa : available_isas()) {
      SCOPED_TRACE(std::string(isa_name(isa)) + ", ranks: " + std::to_string(payloads.size()));
      const Result reduced = run_.reduce(isa, payloads, Runner::residual_from(old));
      ASSERT_TRUE(reduced.payload == wanted.payload);
      ASSERT_TRUE(reduced.residual == wanted.residual);
      ASSERT_TRUE(same_status(reduced.status, wanted.status));
      ASSERT_TRUE(run_.reduce(isa, payloads, Buffer()).payload == mean);
    }
  }

  std::vector<double> numbers(Input input, uint64_t seed) const {
    std::vector<double> result = make_input(input, run_.num_elements(), seed);
    std::fill(result.begin() + kZerosBegin, result.begin() + kZerosEnd, 0.0);
    return result;
  }
  Buffer sent(const std::vector<double>& numbers) const {
    return run_.encode(Isa::kScalar, run_.gradient_from(numbers), Buffer()).payload;
  }
  // Every seventh element -0, the next one subnormal, most of the zero tile zero.
  std::vector<float> residual(Input input, uint64_t seed) const {
    std::vector<float> result = make_residual(input, run_.num_elements(), seed);
    for (size_t i = 0; i + 1 < result.size(); i += 7) {
      result[i] = -0.0f;
      result[i + 1] = -0x1p-140f;
    }
    for (size_t i = kZerosBegin + 50; i < kZerosEnd; ++i) result[i] = i % 2 == 0 ? 0.0f : -0.0f;
    return result;
  }

  const Runner run_;

 private:
  Result encode_at_owner(const std::vector<float>& v) const {
    uint32_t num_bytes = 0;
    std::vector<Tile> tiles = run_.tiles();
    for (Tile& tile : tiles) {
      num_bytes += run_.payload_bytes(tile.num_elements, Stage::kOwner);
      tile.payload_offset = tile.output_offset;
    }
    Result r{Buffer(num_bytes), run_.gradient_from(std::vector<double>(v.begin(), v.end())),
             Runner::residual_from(std::vector<float>(v.size(), -0.0f)),
             std::vector<TileStatus>(tiles.size())};
    const CallSetup s = setup(kSizes);
    const TileBatch batch = {tiles.data(),   static_cast<uint32_t>(tiles.size()),
                             s.dtype,        Stage::kOwner,
                             false,          s.seed,
                             s.step,         &run_.options(),
                             r.status.data()};
    run_.codec(Isa::kScalar)
        .encode(batch, r.gradient.data(), 1.0f, nullptr,
                reinterpret_cast<float*>(r.residual.data()), r.payload.data());
    return r;
  }
};

TEST_P(RankSums, AreInRankOrder) {
  for (const Input input : kInputs) {
    SCOPED_TRACE("input " + std::to_string(static_cast<int>(input)));
    std::vector<Buffer> payloads;
    for (uint32_t rank = 0; rank < 8; ++rank) {
      payloads.push_back(sent(numbers(input, 100 + rank)));
      if (rank != 2 && rank != 4 && rank != 6) compare(payloads, residual(input, 200 + rank));
    }
  }
}

// Ranks whose numbers cancel, and whose scales lie further and further apart.
TEST_P(RankSums, AreInRankOrderWhereNumbersCancel) {
  for (const double step : {1.0, 1.9, 30.0, 1e4}) {
    std::vector<Buffer> payloads;
    double factor = 1;
    for (uint32_t rank = 0; rank < 4; ++rank, factor *= step) {
      std::vector<double> x = numbers(Input::kGaussian, 300);
      for (double& number : x) number *= rank % 2 == 0 ? factor : -factor;
      payloads.push_back(sent(x));
      compare(payloads, residual(Input::kSparse, 400));
    }
  }
}

// Two thirds of the ranks reach infinity before the last third would take them back: by numbers
// that are large all over, and by single ones, which a transform spreads.
TEST_P(RankSums, AreInRankOrderWhereTheyOverflowOnTheWay) {
  const std::vector<float> zero(run_.num_elements(), -0.0f);
  for (const auto& [world_size, stride, magnitude] :
       {std::tuple(3u, 1u, 0.75 * FLT_MAX), std::tuple(12u, 128u, 1.1 * 0x1p125)}) {
    std::vector<Buffer> payloads;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      std::vector<double> x = numbers(Input::kGaussian, 900);
      for (size_t i = 0; i < kZerosBegin; ++i) {
        x[i] = magnitude * (i % stride == 0 ? 1 : 20 * x[i]);
        if (3 * rank >= 2 * world_size) x[i] = -x[i];
      }
      payloads.push_back(sent(x));
    }
    compare(payloads, zero);
  }
}

TEST_P(RankSums, AreInRankOrderForMoreRanksThanAreSummedAtOnce) {
  std::vector<Buffer> payloads;
  for (uint32_t rank = 0; rank < 33; ++rank) {
    payloads.push_back(sent(numbers(Input::kGaussian, 500 + rank)));
    if (rank == 23 || rank == 24 || rank == 32) compare(payloads, residual(Input::kGaussian, 600));
  }
}

TEST_P(RankSums, OfBytesThatNoEncoderWrote) {
  std::mt19937_64 random(9);
  for (uint32_t turn = 0; turn < 16; turn += 2) {
    std::vector<Buffer> payloads;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      payloads.push_back(sent(numbers(Input::kGaussian, 700 + rank)));
    }
    add_noise(payloads[turn % 3], turn, random);
    compare(payloads, residual(Input::kGaussian, 800));
  }
}

std::vector<Case> float32_cases() {
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [](const Case& c) { return c.dtype != ScalarType::kFloat32; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Codecs, RankSums, ::testing::ValuesIn(float32_cases()), case_name);

// --- accumulate
// -----------------------------------------------------------------------------------

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
      if (rank % 2 == 0) compare(s, payloads);
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

TEST_P(Accumulate, OfBytesThatNoEncoderWrote) {
  const CallSetup s = setup(kSizes);
  std::mt19937_64 random(9);
  for (uint32_t turn = 0; turn < 15; turn += 2) {
    std::vector<Buffer> payloads;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      payloads.push_back(sent(Runner(s), Input::kGaussian, 300 + rank));
    }
    add_noise(payloads[turn % 3], turn, random);
    compare(s, payloads);
  }
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, Accumulate, ::testing::ValuesIn(all_cases()), case_name);

}  // namespace
}  // namespace gradferry::testing
