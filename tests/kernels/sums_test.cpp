// The owner's reduce of every codec, its options and every instruction set, against its definition:
// decoded payloads added in rank order, encoded again. With a gain of 1, where codecs have sums of
// their own.
#include <gtest/gtest.h>

#include <random>
#include <tuple>

#include "tests/kernels/codec_runner.h"
#include "tests/kernels/contract_cases.h"
#include "tests/kernels/inputs.h"

namespace gradferry::testing {
namespace {

// Whole tiles, one of them zero on all ranks, ends within blocks, groups and vectors.
const std::vector<uint32_t> kSizes = {4096, 4096, 2048, 1030, 47, 5};
constexpr size_t kZerosBegin = 4096, kZerosEnd = 8192;

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
    for (const Isa isa : available_isas()) {
      SCOPED_TRACE(std::string(isa_name(isa)) + ", ranks: " + std::to_string(payloads.size()));
      const Result reduced = run_.reduce(isa, payloads, Runner::residual_from(old));
      ASSERT_TRUE(reduced.payload == wanted.payload);
      ASSERT_TRUE(reduced.residual == wanted.residual);
      ASSERT_TRUE(same_status(reduced.status, wanted.status));
      const Result averaged = run_.reduce(isa, payloads, Buffer());
      ASSERT_TRUE(averaged.payload == run_.reduce(Isa::kScalar, payloads, Buffer()).payload);
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
      compare(payloads, residual(input, 200 + rank));
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
      compare(payloads, std::vector<float>(run_.num_elements(), -0.0f));
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

// Nothing but noise from a rank: most of it breaks the format, some of it is numbers.
TEST_P(RankSums, OfBytesThatNoEncoderWrote) {
  std::mt19937_64 random(9);
  for (uint32_t turn = 0; turn < 20; ++turn) {
    std::vector<Buffer> payloads;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      payloads.push_back(sent(numbers(Input::kGaussian, 700 + rank)));
    }
    Buffer& noise = payloads[turn % 3];
    for (uint32_t i = 0; i < 1u << turn && i < noise.size(); ++i) {
      noise.data()[random() % noise.size()] = std::byte(random() & 255);
    }
    compare(payloads, residual(Input::kGaussian, 800));
  }
}

std::vector<Case> float32_cases() {
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [](const Case& c) { return c.dtype != ScalarType::kFloat32; });
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Codecs, RankSums, ::testing::ValuesIn(float32_cases()), case_name);

}  // namespace
}  // namespace gradferry::testing
