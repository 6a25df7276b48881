// The q8 codec against a second derivation of docs/reference/wire_format.md, written element by
// element in double arithmetic and sharing nothing with the kernels.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/kernels/one_codec.h"

namespace gradferry::testing {
namespace {

struct ReferenceBlock {
  uint16_t scale;
  std::vector<int> codes;  // empty: all zero
};

ReferenceBlock encode_block(const std::vector<float>& block) {
  float a = 0;
  for (const float x : block) {
    if (!std::isfinite(x)) return {0x7fc0, {}};
    a = std::max(a, std::fabs(x));
  }
  const uint16_t scale = bf16_bits(static_cast<float>(static_cast<double>(a) / 127));
  if (scale < 0x0080) return {0, {}};
  const float r = static_cast<float>(1 / static_cast<double>(bf16_value(scale)));
  ReferenceBlock result{scale, {}};
  for (const float x : block) {
    const float t = static_cast<float>(static_cast<double>(x) * r);
    result.codes.push_back(static_cast<int>(std::nearbyint(t)));
  }
  return result;
}

std::vector<uint8_t> reference_payload(const std::vector<float>& v) {
  const size_t n = v.size(), scales = (n + 15) / 16 * 16, blocks = (n + 127) / 128;
  std::vector<uint8_t> payload((scales + 2 * blocks + 15) / 16 * 16, 0);
  for (size_t block = 0; block < blocks; ++block) {
    const auto begin = v.begin() + static_cast<ptrdiff_t>(128 * block);
    const auto end = v.begin() + static_cast<ptrdiff_t>(std::min(n, 128 * block + 128));
    const ReferenceBlock b = encode_block({begin, end});
    std::memcpy(&payload[scales + 2 * block], &b.scale, 2);
    for (size_t i = 0; i < b.codes.size(); ++i) {
      EXPECT_LE(std::abs(b.codes[i]), 127);
      payload[128 * block + i] = static_cast<uint8_t>(b.codes[i]);
    }
  }
  return payload;
}

class Q8 : public OneCodec {
 public:
  explicit Q8(std::vector<uint32_t> sizes) : OneCodec("q8", std::move(sizes)) {}
};

TEST(Q8Codec, WritesTheBytesOfASecondDerivation) {
  for (const Input input : kInputs) {
    for (const uint32_t n : {1u, 15u, 17u, 127u, 128u, 129u, 1000u, 1025u, 3000u, 4096u}) {
      const std::vector<float> v = floats(input, n, n);
      const std::vector<uint8_t> expected = reference_payload(v);
      for (const Isa isa : available_isas()) {
        ASSERT_EQ(Q8({n}).encode(isa, v).payload.as<uint8_t>(), expected)
            << isa_name(isa) << " n " << n << " input " << static_cast<int>(input);
      }
    }
  }
}

TEST(Q8Codec, WritesTheBytesOfASecondDerivationAtEveryExponent) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> uniform(-2.0, 2.0);
  for (int exponent = -149; exponent <= 127; ++exponent) {
    std::vector<float> v(300);
    for (float& x : v) x = static_cast<float>(std::ldexp(uniform(random), exponent));
    if (exponent == 127) v[0] = -FLT_MAX;
    ASSERT_EQ(Q8({300}).encode(active_isa(), v).payload.as<uint8_t>(), reference_payload(v))
        << exponent;
  }
}

TEST(Q8Codec, PayloadHasTheDocumentedSize) {
  const Q8 q8({1});
  EXPECT_EQ(q8.run().payload_bytes(4096, Stage::kWorker), 4160u);
  EXPECT_EQ(q8.run().payload_bytes(4096, Stage::kOwner), 4160u);
  for (uint32_t n = 1; n <= kTileElements; ++n) {
    const uint32_t bytes = (n + 15) / 16 * 16 + 2 * ((n + 127) / 128);
    ASSERT_EQ(q8.run().payload_bytes(n, Stage::kWorker), (bytes + 15) / 16 * 16);
  }
}

// A scale is rounded down by 2^-8 of itself at worst, just below a tie: there the quotient of the
// largest magnitude is 127.496. Every tie of 8 bits, and the floats around it, in one octave.
TEST(Q8Codec, LargestMagnitudeNeverNeedsMoreThan127) {
  const Q8 q8({4096});
  std::vector<float> v(4096, 0.0f);
  for (int tie = 0; tie < 128; ++tie) {
    const double scale = std::ldexp(257 + 2 * tie, -8);
    float near = static_cast<float>(127 * scale);
    for (int k = 0; k < 8; ++k) near = std::nextafter(near, 0.0f);
    for (size_t block = 0; block < 32; ++block) {
      v[128 * block] = block % 2 == 0 ? near : -near;
      near = std::nextafter(near, INFINITY);
    }
    for (const Isa isa : available_isas()) {
      const Buffer payload = q8.encode(isa, v).payload;
      for (size_t i = 0; i < 4096; ++i) {
        const int byte = std::to_integer<int>(payload.data()[i]);
        const int code = byte < 128 ? byte : byte - 256;
        ASSERT_LE(std::abs(code), 127);
        ASSERT_EQ(std::abs(code) > 125, v[i] != 0);
        ASSERT_EQ(code < 0, v[i] < 0);
      }
    }
  }
}

TEST(Q8Codec, DecodesEveryCodeAtEveryScaleExactlyAndRefusesBrokenScales) {
  const Q8 q8({256});
  Buffer payload(q8.run().payload_bytes(256, Stage::kWorker), 0, 0);
  for (int i = 0; i < 256; ++i) payload.data()[i] = std::byte(i == 0x80 ? 0 : i);
  for (uint32_t scale = 0; scale < 65536; scale += scale % 128 == 3 ? 60 : 1) {
    std::memcpy(payload.data() + 256, &scale, 2);
    std::memcpy(payload.data() + 258, &scale, 2);
    uint32_t flags;
    const std::vector<float> decoded = q8.decode(payload, &flags);
    const bool is_number = scale >= 0x0080 && scale <= 0x7c01;
    for (int i = 0; i < 256; ++i) {
      const int code = i == 0x80 ? 0 : i < 128 ? i : i - 256;
      const float exact = static_cast<float>(code) * bf16_value(static_cast<uint16_t>(scale));
      const float expected = is_number && code != 0    ? exact
                             : is_number || scale == 0 ? 0.0f
                                                       : bf16_value(0x7fc0);
      ASSERT_EQ(float_bits(decoded[i]), float_bits(expected)) << scale;
      ASSERT_FALSE(is_number && !std::isfinite(decoded[i]));
    }
    const uint32_t broken = scale == 0x7fc0 ? 0u : kTileCorrupt;
    ASSERT_EQ(flags, is_number || scale == 0 ? 0u : kTileNonFinite | broken) << scale;
  }
}

TEST(Q8Codec, CodeMinus128MakesOnlyItsBlockNan) {
  for (const uint32_t n : {4096u, 389u}) {
    const Q8 q8({n});
    const std::vector<float> v = floats(Input::kGaussian, n, 1);
    const Buffer good = q8.encode(active_isa(), v).payload;
    const std::vector<float> before = q8.decode(good);
    for (const uint32_t position : {0u, 127u, 130u, 255u, 388u}) {
      Buffer bad = good;
      bad.data()[position] = std::byte(0x80);
      for (const Isa isa : available_isas()) {
        const Result r = q8.run().decode(isa, bad, Buffer(), Stage::kWorker);
        EXPECT_EQ(r.status[0].flags, kTileNonFinite | kTileCorrupt);
        const std::vector<float> after = r.gradient.as<float>();
        for (uint32_t i = 0; i < n; ++i) {
          const uint32_t expected = i / 128 == position / 128 ? 0x7fc00000u : float_bits(before[i]);
          ASSERT_EQ(float_bits(after[i]), expected) << i;
        }
        EXPECT_EQ(q8.run().reduce(isa, {good, bad}, Buffer()).status[0].flags,
                  kTileNonFinite | kTileCorrupt);
      }
    }
  }
}

// In a block without numbers, and beyond the last element.
TEST(Q8Codec, CodesThatMeanNothingAreNotLookedAt) {
  const Q8 q8({200});
  Buffer payload = q8.encode(active_isa(), floats(Input::kGaussian, 200, 1)).payload;
  const std::vector<float> before = q8.decode(payload);
  for (const uint16_t scale : {uint16_t{0x0000}, uint16_t{0x7fc0}}) {
    std::memset(payload.data(), 0x80, 128);
    std::memset(payload.data() + 200, 0x80, 8);
    std::memcpy(payload.data() + 208, &scale, 2);
    uint32_t flags;
    const std::vector<float> after = q8.decode(payload, &flags);
    EXPECT_EQ(flags, scale == 0 ? 0u : kTileNonFinite);
    for (size_t i = 0; i < 200; ++i) {
      const uint32_t expected =
          i < 128 ? static_cast<uint32_t>(scale) << 16 : float_bits(before[i]);
      ASSERT_EQ(float_bits(after[i]), expected);
    }
  }
}

TEST(Q8Codec, NonFiniteBlockLeavesTheOtherBlocksAlone) {
  const Q8 q8({1000});
  std::vector<float> v = floats(Input::kGaussian, 1000, 9);
  const std::vector<float> old = make_residual(Input::kGaussian, 1000, 10);
  const std::vector<float> clean = q8.encode(active_isa(), v, old).residual.as<float>();
  v[255] = NAN;
  v[999] = -INFINITY;
  for (const Isa isa : available_isas()) {
    const std::vector<float> residual = q8.encode(isa, v, old).residual.as<float>();
    for (size_t i = 0; i < 1000; ++i) {
      const float expected = i / 128 == 1 || i / 128 == 7 ? old[i] : clean[i];
      ASSERT_EQ(float_bits(residual[i]), float_bits(expected)) << i;
    }
  }
}

TEST(Q8Codec, LargestFloatsDecodeToFiniteValues) {
  const Q8 q8({256});
  for (const float largest : {FLT_MAX, -FLT_MAX, 0x1.fep127f, 0x1.fdp127f}) {
    uint32_t flags;
    const std::vector<float> v(256, largest);
    for (const float x : q8.decode(q8.encode(active_isa(), v).payload, &flags)) {
      ASSERT_NEAR(x / largest, 1.0, 0.5 / 126);
    }
    EXPECT_EQ(flags, 0u);
  }
}

TEST(Q8Codec, BlocksBelowTheSmallestScaleStayInTheResidual) {
  const Q8 q8({200});
  const float smallest = 127 * 0x1.fep-127f;  // its scale ties with 2^-126, which is even
  for (const float tiny : {0x1p-149f, 0x1p-126f, 127 * 0x1.fdp-127f}) {
    const Result r =
        q8.encode(active_isa(), std::vector<float>(200, -tiny), std::vector<float>(200, 0.0f));
    for (const uint8_t byte : r.payload.as<uint8_t>()) ASSERT_EQ(byte, 0);
    for (const float x : r.residual.as<float>()) ASSERT_EQ(x, -tiny);
  }
  const Result r = q8.encode(active_isa(), std::vector<float>(200, smallest));
  EXPECT_EQ(r.payload.as<uint8_t>()[208], 0x80);
}

// Integers times a power of two come back exactly and withhold nothing.
TEST(Q8Codec, RepresentableValuesAreExact) {
  const Q8 q8({4096});
  std::vector<float> v(4096);
  for (size_t i = 0; i < v.size(); ++i) {
    const int code = i % 128 == 0 ? 127 : static_cast<int>(i * 37 % 255) - 127;
    v[i] = static_cast<float>(std::ldexp(code, static_cast<int>(i / 128) - 16));
  }
  for (const Isa isa : available_isas()) {
    const Result r = q8.encode(isa, v, std::vector<float>(4096, 0.0f));
    for (const float x : r.residual.as<float>()) ASSERT_EQ(x, 0.0f);
  }
}

// An element's error is at most S / 2 and some roundings, and S at most (1 + 2^-8) a / 127. So a
// block of n loses at most n / 4 * (1.004 / 127)^2 of a^2, and a^2 is at most the power: 0.2 %.
TEST(Q8Codec, ErrorIsAContractionInTheWorstCase) {
  constexpr double kBound = 128 / 4.0 * (1.004 / 127) * (1.004 / 127);
  const Q8 q8({1024});
  double worst = 0;
  for (int step = 0; step < 256; ++step) {
    std::vector<float> v(1024);
    const double largest = 1.0 + step / 256.0;
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] = static_cast<float>(i % 128 == 0 ? largest : largest / 127 * 0.499);
    }
    worst = std::max(worst, squared_error(v, q8.round_trip(v)) / squares(v));
  }
  EXPECT_LE(worst, kBound);
  EXPECT_GE(worst, 0.9 * kBound);  // and the bound is nearly reached
  for (const Input input : {Input::kGaussian, Input::kHeavyTail, Input::kWideRange, Input::kHuge}) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
      const std::vector<float> v = floats(input, 1024, seed);
      EXPECT_LE(squared_error(v, q8.round_trip(v)), kBound * squares(v));
    }
  }
}

// A rounding error is uniform: S^2 / 12, S = a / 127, and a^2 is 8.15 on average for the largest of
// 128 Gaussian magnitudes. 0.0042 %; 2048 blocks give it to 0.6 %.
TEST(Q8Codec, GaussianErrorIsThatOfUniformRounding) {
  const uint32_t tiles = 64;
  const std::vector<float> v = floats(Input::kGaussian, tiles * 4096, 123);
  const Q8 q8(std::vector<uint32_t>(tiles, 4096));
  EXPECT_NEAR(squared_error(v, q8.round_trip(v)) / squares(v), 4.21e-5, 0.12e-5);
}

}  // namespace
}  // namespace gradferry::testing
