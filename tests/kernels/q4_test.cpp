// The q4 codec against a second derivation of docs/reference/wire_format.md, written element by
// element in double arithmetic and sharing nothing with the kernels.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/kernels/one_codec.h"

namespace gradferry::testing {
namespace {

constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

// The value of an E4M3 byte without sign (bias 7).
double e4m3(int byte) {
  const int exponent = byte >> 3;
  return exponent == 0 ? std::ldexp(byte & 7, -9) : std::ldexp(8 + (byte & 7), exponent - 10);
}

// Nearest of the eight values, ties to the even code.
int nearest_code(double t) {
  int best = 0;
  for (int code = 1; code < 8; ++code) {
    const double nearer = std::fabs(t - kValues[best]) - std::fabs(t - kValues[code]);
    if (nearer > 0 || (nearer == 0 && code % 2 == 0)) best = code;
  }
  return best;
}

void encode_group(const std::vector<float>& v, uint8_t* codes, uint8_t* scales, uint8_t* exponent) {
  float m = 0;
  for (const float x : v) {
    if (!std::isfinite(x)) {
      *exponent = 255;
      return;
    }
    m = std::max(m, std::fabs(x));
  }
  const int k = m < 0x1p-126f ? -118 : std::max(std::ilogb(m) - 10, -118);
  bool any = false;
  for (size_t block = 0; block * 32 < v.size(); ++block) {
    const size_t end = std::min(v.size(), block * 32 + 32);
    float a = 0;
    for (size_t i = block * 32; i < end; ++i) a = std::max(a, std::fabs(v[i]));
    const float scaled = static_cast<float>(std::ldexp(a, -k));
    const float y = static_cast<float>(static_cast<double>(scaled) / 6.0);
    double s = round_to_format(y, 4, -1000, INFINITY);
    if (k == 117 && s > 320) s = 320;
    if (s < 0x1p-6) continue;
    int byte = 8;
    while (e4m3(byte) != s) ++byte;
    scales[block] = static_cast<uint8_t>(byte);
    any = true;
    const float S = static_cast<float>(std::ldexp(s, k));
    const float r = static_cast<float>(1.0 / static_cast<double>(S));
    for (size_t i = block * 32; i < end; ++i) {
      const float t = static_cast<float>(static_cast<double>(std::fabs(v[i])) * r);
      int code = nearest_code(t);
      if (code != 0 && v[i] < 0) code |= 8;
      const size_t j = i % 32;
      codes[block * 16 + j % 16] |= static_cast<uint8_t>(j < 16 ? code : code << 4);
    }
  }
  *exponent = any ? static_cast<uint8_t>(k + 128) : 0;
}

std::vector<uint8_t> reference_payload(const std::vector<float>& v) {
  const size_t n = v.size(), b = (n + 31) / 32, groups = (n + 1023) / 1024;
  std::vector<uint8_t> payload((17 * b + groups + 15) / 16 * 16, 0);
  for (size_t group = 0; group < groups; ++group) {
    const auto begin = v.begin() + static_cast<ptrdiff_t>(1024 * group);
    const auto end = v.begin() + static_cast<ptrdiff_t>(std::min(n, 1024 * group + 1024));
    encode_group({begin, end}, &payload[512 * group], &payload[16 * b + 32 * group],
                 &payload[17 * b + group]);
  }
  return payload;
}

class Q4 : public OneCodec {
 public:
  explicit Q4(std::vector<uint32_t> sizes) : OneCodec("q4", std::move(sizes)) {}
};

TEST(Q4Codec, WritesTheBytesOfASecondDerivation) {
  for (const Input input : kInputs) {
    for (const uint32_t n : {1u, 31u, 32u, 33u, 1000u, 1024u, 1025u, 3000u, 4096u}) {
      const std::vector<float> v = floats(input, n, n);
      const std::vector<uint8_t> expected = reference_payload(v);
      for (const Isa isa : available_isas()) {
        ASSERT_EQ(Q4({n}).encode(isa, v).payload.as<uint8_t>(), expected)
            << isa_name(isa) << " n " << n << " input " << static_cast<int>(input);
      }
    }
  }
}

// Scales of every size: each power of two as the group's maximum, beside a block of every
// smaller magnitude.
TEST(Q4Codec, WritesTheBytesOfASecondDerivationAtEveryExponent) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> uniform(1.0, 2.0);
  for (int exponent = -149; exponent <= 127; ++exponent) {
    std::vector<float> v(1024);
    for (size_t i = 0; i < v.size(); ++i) {
      const int smaller = static_cast<int>(i / 32);
      v[i] = static_cast<float>(std::ldexp(uniform(random), exponent - smaller)) *
             (i % 3 == 0 ? -1.0f : 1.0f);
    }
    if (exponent == 127) v[0] = FLT_MAX;
    ASSERT_EQ(Q4({1024}).encode(active_isa(), v).payload.as<uint8_t>(), reference_payload(v))
        << exponent;
  }
}

TEST(Q4Codec, PayloadHasTheDocumentedSize) {
  const Q4 q4({1});
  const Runner& run = q4.run();
  EXPECT_EQ(run.payload_bytes(4096, Stage::kWorker), 2192u);
  EXPECT_EQ(run.payload_bytes(4096, Stage::kOwner), 2192u);
  EXPECT_EQ(run.payload_bytes(1, Stage::kWorker), 32u);
  for (uint32_t n = 1; n <= kTileElements; ++n) {
    const uint32_t b = (n + 31) / 32, groups = (n + 1023) / 1024;
    ASSERT_EQ(run.payload_bytes(n, Stage::kWorker), (17 * b + groups + 15) / 16 * 16);
  }
}

TEST(Q4Codec, DecodesEveryCodeAtEveryValidScaleExactly) {
  const Q4 q4({1024});
  for (int exponent = 10; exponent <= 245; ++exponent) {
    const int k = exponent - 128;
    const int last = k == 117 ? 0x7a : 0x7e;
    Buffer payload(q4.run().payload_bytes(1024, Stage::kWorker), 0, 0);
    std::vector<int> scale(32);
    for (int block = 0; block < 32; ++block) {
      scale[block] = 8 + (block * 37 + exponent) % (last - 7);
      payload.data()[512 + block] = std::byte(scale[block]);
      for (int j = 0; j < 16; ++j) payload.data()[16 * block + j] = std::byte(j | (15 - j) << 4);
    }
    payload.data()[544] = std::byte(exponent);
    const std::vector<float> decoded = q4.decode(payload);
    for (int i = 0; i < 1024; ++i) {
      const int j = i % 32, code = j < 16 ? j : 15 - (j - 16);
      const double magnitude = std::ldexp(kValues[code & 7] * e4m3(scale[i / 32]), k);
      const float expected = static_cast<float>((code & 8) != 0 ? -magnitude : magnitude);
      ASSERT_EQ(float_bits(decoded[i]), float_bits(expected)) << "code " << code << " k " << k;
    }
  }
}

TEST(Q4Codec, ZeroBlockAndZeroGroupDecodeToPositiveZeroWhateverTheirCodes) {
  const Q4 q4({1024});
  Buffer payload(q4.run().payload_bytes(1024, Stage::kWorker), 0, 0xff);
  std::memset(payload.data() + 512, 0, 32);
  for (const int exponent : {0, 10, 128, 245}) {
    payload.data()[544] = std::byte(exponent);
    uint32_t flags;
    for (const float x : q4.decode(payload, &flags)) ASSERT_EQ(float_bits(x), 0u);
    EXPECT_EQ(flags, 0u);
  }
}

TEST(Q4Codec, BrokenBytesMakeOnlyTheirGroupNanAndAreFlagged) {
  const Q4 q4({3000});
  const std::vector<float> v = floats(Input::kGaussian, 3000, 1);
  const Buffer good = q4.encode(active_isa(), v).payload;
  const std::vector<float> before = q4.decode(good);
  const size_t scales = 16 * 94, exponents = 17 * 94;
  const auto is_corrupt = [&](size_t position, int value, int exponent) {
    Buffer bad = good;
    bad.data()[exponents + 1] = std::byte(exponent);
    bad.data()[position] = std::byte(value);
    uint32_t flags;
    const std::vector<float> after = q4.decode(bad, &flags);
    for (size_t i = 0; i < after.size(); ++i) {
      const bool as_before = float_bits(after[i]) == float_bits(before[i]);
      EXPECT_TRUE(as_before || i / 1024 == 1);
    }
    const bool nan = std::isnan(after[1024]);
    for (size_t i = 1024; i < 2048; ++i) EXPECT_EQ(float_bits(after[i]) == 0x7fc00000u, nan);
    EXPECT_EQ(nan, flags != 0);
    return (flags & kTileCorrupt) != 0;
  };
  const int usual = static_cast<int>(good.data()[exponents + 1]);
  for (int byte = 0; byte < 256; ++byte) {
    const bool bad_scale = byte >= 0x7f || (byte >= 1 && byte <= 7);
    EXPECT_EQ(is_corrupt(scales + 33, byte, usual), bad_scale) << byte;
    EXPECT_EQ(is_corrupt(scales + 63, byte, 245), bad_scale || byte > 0x7a) << byte;
    EXPECT_TRUE(is_corrupt(scales + 40, byte, 0)) << byte;  // the other scales are not 0
    EXPECT_TRUE(is_corrupt(scales + 40, byte, 255)) << byte;
    const bool bad_exponent = byte < 10 || byte > 245;  // 0 and 255: scales are not 0
    EXPECT_EQ(is_corrupt(exponents + 1, byte, usual), bad_exponent) << byte;
  }
}

TEST(Q4Codec, NonFiniteGroupLeavesTheOtherGroupsAlone) {
  CallSetup setup;
  setup.sizes = {4096};
  const Runner run(setup);
  std::vector<double> input = make_input(Input::kGaussian, 4096, 9);
  const std::vector<float> old = make_residual(Input::kGaussian, 4096, 10);
  const Result clean = run.encode(active_isa(), run.gradient_from(input), run.residual_from(old));
  input[2047] = NAN;
  const Result r = run.encode(active_isa(), run.gradient_from(input), run.residual_from(old));
  const std::vector<float> residual = r.residual.as<float>();
  const std::vector<float> clean_residual = clean.residual.as<float>();
  for (size_t i = 0; i < 4096; ++i) {
    const float expected = i / 1024 == 1 ? old[i] : clean_residual[i];
    ASSERT_EQ(float_bits(residual[i]), float_bits(expected)) << i;
  }
}

// 1.03 % in the limit; the standard deviation of the mean over 2^20 elements is below 0.01 %.
TEST(Q4Codec, GaussianErrorIsOnePercentOfThePower) {
  const uint32_t tiles = 256;
  const Q4 q4(std::vector<uint32_t>(tiles, 4096));
  const std::vector<float> v = floats(Input::kGaussian, tiles * 4096, 123);
  const double nmse = squared_error(v, q4.decode(q4.encode(active_isa(), v).payload)) / squares(v);
  EXPECT_LE(nmse, 0.011);
  EXPECT_GE(nmse, 0.009);
}

// Error feedback converges if |v - D(C(v))|^2 <= c |v|^2 with c < 1. For q4, c = 0.062:
// a block's largest magnitude has t in [6 * 16/17, 6 * 17/16] (a scale of 4 significant bits), so
// contributes at least 31.8 to the power, in units of S^2, and 0.375^2 to the error; the other 31
// cost most where the error is all of them, t = 1/4: 31 / 16 to both. (1.94 + 0.15) / (31.8 + 1.94)
// = 0.062. Zero blocks hold less than 32 (6 * 2^-6)^2 against 2^20 of the group's maximum.
TEST(Q4Codec, ErrorIsAContractionInTheWorstCase) {
  constexpr double kBound = 0.062;
  const Q4 q4({1024});
  double worst = 0;
  for (int step = 0; step < 400; ++step) {
    std::vector<float> v(1024);
    const double largest = 1.0 + step / 400.0;
    for (size_t i = 0; i < v.size(); ++i) {
      v[i] =
          static_cast<float>(i % 32 == 0 ? largest : largest * 0.25 / 6 * (0.9 + step % 17 / 80.0));
    }
    const double ratio =
        squared_error(v, q4.decode(q4.encode(active_isa(), v).payload)) / squares(v);
    worst = std::max(worst, ratio);
  }
  EXPECT_LE(worst, kBound);
  EXPECT_GE(worst, 0.05);  // and the bound is nearly reached
  for (const Input input : {Input::kGaussian, Input::kHeavyTail, Input::kWideRange, Input::kHuge}) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
      const std::vector<float> v = floats(input, 1024, seed);
      const std::vector<float> decoded = q4.decode(q4.encode(active_isa(), v).payload);
      EXPECT_LE(squared_error(v, decoded), kBound * squares(v));
    }
  }
}

TEST(Q4Codec, LargestFloatsDecodeToFiniteValues) {
  const Q4 q4({4096});
  for (const float largest : {FLT_MAX, -FLT_MAX, 0x1.6p127f, 0x1.8p127f}) {
    uint32_t flags;
    const std::vector<float> v(4096, largest);
    for (const float x : q4.decode(q4.encode(active_isa(), v).payload, &flags)) {
      ASSERT_TRUE(std::isfinite(x));
      ASSERT_NEAR(x / largest, 1.0, 0.07);
    }
    EXPECT_EQ(flags, 0u);
  }
}

// Values that E2M1 times a power of two holds exactly come back exactly and withhold nothing.
TEST(Q4Codec, RepresentableValuesAreExact) {
  CallSetup setup;
  setup.sizes = {1024};
  const Runner run(setup);
  std::vector<double> input(1024);
  for (size_t i = 0; i < input.size(); ++i) {
    input[i] =
        kValues[i % 8] * (i % 32 < 16 ? 1 : -1) * std::ldexp(1.0, static_cast<int>(i / 32) % 5);
  }
  const Buffer zero_residual = run.residual_from(std::vector<float>(1024, 0.0f));
  for (const Isa isa : available_isas()) {
    const Result r = run.encode(isa, run.gradient_from(input), zero_residual);
    for (const float x : r.residual.as<float>()) ASSERT_EQ(x, 0.0f);
  }
}

}  // namespace
}  // namespace gradferry::testing
