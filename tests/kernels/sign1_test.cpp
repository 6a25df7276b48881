// The sign1 codec against a second derivation of docs/reference/wire_format.md, written element by
// element in double arithmetic and sharing nothing with the kernels.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/kernels/one_codec.h"

namespace gradferry::testing {
namespace {

// The sum of two floats in double is exact enough to be rounded to float once more without harm, as
// are products and quotients (53 >= 2 * 24 + 2).
float tree_sum(const std::vector<float>& v, size_t first, size_t count) {
  if (count == 1) return first < v.size() ? std::ldexp(std::fabs(v[first]), -7) : 0.0f;
  const double left = tree_sum(v, first, count / 2);
  return static_cast<float>(left + tree_sum(v, first + count / 2, count / 2));
}

uint16_t reference_scale(const std::vector<float>& block) {
  for (const float x : block) {
    if (!std::isfinite(x)) return 0x7fc0;
  }
  const double share = static_cast<double>(block.size()) / 128;
  const float mean = static_cast<float>(tree_sum(block, 0, 128) / share);
  const uint16_t scale = bf16_bits(std::min(mean, 0x1.fep127f));
  return scale < 0x0080 ? 0 : scale;
}

std::vector<uint8_t> reference_payload(const std::vector<float>& v) {
  const size_t n = v.size(), scales = 2 * ((n + 15) / 16), blocks = (n + 127) / 128;
  std::vector<uint8_t> payload((scales + 2 * blocks + 15) / 16 * 16, 0);
  for (size_t block = 0; block < blocks; ++block) {
    const size_t first = 128 * block, end = std::min(n, first + 128);
    const auto begin = v.begin() + static_cast<ptrdiff_t>(first);
    const uint16_t scale = reference_scale({begin, v.begin() + static_cast<ptrdiff_t>(end)});
    std::memcpy(&payload[scales + 2 * block], &scale, 2);
    if (scale == 0 || scale == 0x7fc0) continue;
    for (size_t i = first; i < end; ++i) {
      if (std::signbit(v[i])) payload[i / 8] |= static_cast<uint8_t>(1 << (i % 8));
    }
  }
  return payload;
}

class Sign1 : public OneCodec {
 public:
  explicit Sign1(std::vector<uint32_t> sizes) : OneCodec("sign1", std::move(sizes)) {}
};

uint16_t scale_at(const Buffer& payload, size_t offset) {
  uint16_t scale;
  std::memcpy(&scale, payload.data() + offset, 2);
  return scale;
}

TEST(Sign1Codec, WritesTheBytesOfASecondDerivation) {
  for (const Input input : kInputs) {
    for (const uint32_t n : {1u, 15u, 17u, 127u, 128u, 129u, 1000u, 1025u, 3000u, 4096u}) {
      const std::vector<float> v = floats(input, n, n);
      const std::vector<uint8_t> expected = reference_payload(v);
      for (const Isa isa : available_isas()) {
        ASSERT_EQ(Sign1({n}).encode(isa, v).payload.as<uint8_t>(), expected)
            << isa_name(isa) << " n " << n << " input " << static_cast<int>(input);
      }
    }
  }
}

TEST(Sign1Codec, WritesTheBytesOfASecondDerivationAtEveryExponent) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> uniform(1.0, 2.0);
  for (int exponent = -149; exponent <= 127; ++exponent) {
    std::vector<float> v(300);
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] = static_cast<float>(std::ldexp(uniform(random), exponent)) * (i % 3 == 0 ? -1 : 1);
    }
    ASSERT_EQ(Sign1({300}).encode(active_isa(), v).payload.as<uint8_t>(), reference_payload(v))
        << exponent;
  }
}

TEST(Sign1Codec, PayloadHasTheDocumentedSize) {
  const Sign1 sign1({1});
  EXPECT_EQ(sign1.run().payload_bytes(4096, Stage::kWorker), 576u);
  EXPECT_EQ(sign1.run().payload_bytes(4096, Stage::kOwner), 576u);
  for (uint32_t n = 1; n <= kTileElements; ++n) {
    const uint32_t bytes = 2 * ((n + 15) / 16) + 2 * ((n + 127) / 128);
    ASSERT_EQ(sign1.run().payload_bytes(n, Stage::kWorker), (bytes + 15) / 16 * 16);
  }
}

TEST(Sign1Codec, DecodesEverySignAndScaleAndRefusesBrokenScales) {
  const Sign1 sign1({256});
  Buffer payload(sign1.run().payload_bytes(256, Stage::kWorker), 0, 0xca);
  const uint16_t one = 0x3f80;
  for (uint32_t scale = 0; scale < 65536; scale += scale % 128 == 1 ? 62 : 1) {
    std::memcpy(payload.data() + 32, &scale, 2);
    std::memcpy(payload.data() + 34, &one, 2);
    uint32_t flags;
    const std::vector<float> decoded = sign1.decode(payload, &flags);
    const bool is_number = scale >= 0x0080 && scale <= 0x7f7f;
    const float magnitude = bf16_value(static_cast<uint16_t>(scale));
    for (size_t i = 0; i < 128; ++i) {
      const bool is_negative = (0xca >> (i % 8) & 1) != 0;
      const float expected = is_number    ? (is_negative ? -magnitude : magnitude)
                             : scale == 0 ? 0.0f
                                          : bf16_value(0x7fc0);
      ASSERT_EQ(float_bits(decoded[i]), float_bits(expected)) << scale;
      ASSERT_EQ(decoded[128 + i], is_negative ? -1.0f : 1.0f);
    }
    const uint32_t broken = scale == 0x7fc0 ? 0u : kTileCorrupt;
    ASSERT_EQ(flags, is_number || scale == 0 ? 0u : kTileNonFinite | broken) << scale;
  }
}

TEST(Sign1Codec, NonFiniteBlockLeavesTheOtherBlocksAlone) {
  const Sign1 sign1({1000});
  std::vector<float> v = floats(Input::kGaussian, 1000, 9);
  const std::vector<float> old = make_residual(Input::kGaussian, 1000, 10);
  const std::vector<float> clean = sign1.encode(active_isa(), v, old).residual.as<float>();
  for (const size_t poisoned : {255u, 999u}) {
    v[poisoned] = NAN;
    for (const Isa isa : available_isas()) {
      const std::vector<float> residual = sign1.encode(isa, v, old).residual.as<float>();
      for (size_t i = 0; i < 1000; ++i) {
        const float expected =
            std::isnan(v[i / 128 == 1 ? 255 : 999]) && (i / 128 == 1 || i / 128 == 7) ? old[i]
                                                                                      : clean[i];
        ASSERT_EQ(float_bits(residual[i]), float_bits(expected)) << i;
      }
    }
  }
}

TEST(Sign1Codec, ZerosHaveTheSignOfTheirBitUnlessTheirBlockIsZero) {
  const Sign1 sign1({256});
  std::vector<float> v(256, -0.0f);
  for (size_t i = 0; i < 128; ++i) v[i] = i % 4 == 0 ? 4.0f : i % 4 == 1 ? -0.0f : 0.0f;
  // A sum of zeros keeps its sign if both have it.
  const Result r = sign1.encode(active_isa(), v, std::vector<float>(256, -0.0f));
  const std::vector<float> decoded = sign1.decode(r.payload);
  for (size_t i = 0; i < 256; ++i) {
    const float expected = i >= 128 ? 0.0f : i % 4 == 1 ? -1.0f : 1.0f;
    ASSERT_EQ(float_bits(decoded[i]), float_bits(expected)) << i;
    ASSERT_EQ(r.residual.as<float>()[i], v[i] - expected);
  }
}

// Every sum of magnitudes near the largest float exceeds the floats, at every length of a block.
TEST(Sign1Codec, SumsOfTheLargestFloatsDoNotOverflow) {
  for (uint32_t n = 1; n <= 130; ++n) {
    const Sign1 sign1({n});
    const std::vector<float> v(n, n % 2 == 0 ? FLT_MAX : -FLT_MAX);
    for (const Isa isa : available_isas()) {
      const Result r = sign1.encode(isa, v, std::vector<float>(n, 0.0f));
      ASSERT_EQ(r.status[0].flags, 0u);
      ASSERT_EQ(scale_at(r.payload, 2 * ((n + 15) / 16)), 0x7f7f) << n;
      for (const float x : r.residual.as<float>()) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

TEST(Sign1Codec, BlocksBelowTheSmallestScaleStayInTheResidual) {
  const Sign1 sign1({200});
  const float half_way = 0x1.fep-127f;  // to the smallest normal bf16 from the one below: ties up
  for (const float tiny : {0x1p-149f, 0x1p-127f, 0x1.fdp-127f}) {
    const Result r =
        sign1.encode(active_isa(), std::vector<float>(200, -tiny), std::vector<float>(200, 0.0f));
    for (const uint8_t byte : r.payload.as<uint8_t>()) ASSERT_EQ(byte, 0);
    for (const float x : r.residual.as<float>()) ASSERT_EQ(x, -tiny);
  }
  const Buffer payload = sign1.encode(active_isa(), std::vector<float>(200, half_way)).payload;
  EXPECT_EQ(scale_at(payload, 26), 0x0080);
}

// |v - S sign(v)|^2 = |v|^2 - 2 S |v|_1 + n S^2. With S = (1 + e) |v|_1 / n this is
// (1 - d) |v|^2 + e^2 d |v|^2, d = |v|_1^2 / (n |v|^2). bf16 has 8 significant bits, so |e| is at
// most 2^-8 from rounding to it, and 10 * 2^-24 from seven sums, two products and a quotient
// before.
TEST(Sign1Codec, BlockErrorIsTheContractionOfSignTimesMean) {
  const double largest_e = 0x1p-8 * (1 + 0x1p-12);
  for (const Input input : {Input::kGaussian, Input::kHeavyTail, Input::kTies, Input::kSparse}) {
    for (uint64_t seed = 0; seed < 100; ++seed) {
      const uint32_t n = seed < 50 ? 128 : static_cast<uint32_t>(seed - 49);
      const std::vector<float> v = floats(input, n, seed);
      double sum = 0;
      for (const float x : v) sum += std::fabs(x);
      const double power = squares(v);
      const double sent = sum * sum / n;  // d |v|^2
      const double error = squared_error(v, Sign1({n}).round_trip(v));
      const double tolerance = 1e-12 * power;  // of these sums in double
      EXPECT_GE(error, power - sent - tolerance);
      EXPECT_LE(error, power - sent * (1 - largest_e * largest_e) + tolerance);
    }
  }
}

// 1 - 2/pi = 36.34 % for long blocks; (1 - 1/128) of that with the mean of 128 itself: 36.05 %.
TEST(Sign1Codec, GaussianErrorIsThatOfSignTimesMean) {
  const uint32_t tiles = 64;
  const std::vector<float> v = floats(Input::kGaussian, tiles * 4096, 123);
  const Sign1 sign1(std::vector<uint32_t>(tiles, 4096));
  EXPECT_NEAR(squared_error(v, sign1.round_trip(v)) / squares(v), 0.3605, 0.003);
}

}  // namespace
}  // namespace gradferry::testing
