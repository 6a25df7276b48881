// The topk codec against a second derivation of docs/reference/wire_format.md: a stable sort, bytes
// written one by one. It shares nothing with the kernels; 4-bit values are checked against the q4
// codec.
#include <gtest/gtest.h>

#include <algorithm>

#include "gradferry/error.h"
#include "tests/kernels/codec_runner.h"
#include "tests/kernels/inputs.h"

namespace gradferry::testing {
namespace {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;

constexpr uint32_t kNan = 0x7fc00000u;

Runner runner(const std::string& codec, std::vector<uint32_t> sizes) {
  CallSetup setup;
  setup.codec = codec;
  setup.sizes = std::move(sizes);
  return Runner(setup);
}

Buffer gradient_of(const Runner& run, const Floats& v) {
  return run.gradient_from(std::vector<double>(v.begin(), v.end()));
}

Floats floats(Input input, size_t n, uint64_t seed) {
  const std::vector<double> values = make_input(input, n, seed);
  Floats result(n);
  for (size_t i = 0; i < n; ++i) result[i] = static_cast<float>(values[i]);
  return result;
}

uint32_t kept(uint32_t n, double ratio) {
  return static_cast<uint32_t>(std::max(1.0, std::floor((ratio * 1e6 * n + 5e5) / 1e6)));
}

uint32_t key(float x) { return float_bits(x) & 0x7fffffffu; }

std::vector<uint32_t> largest(const Floats& v, uint32_t k) {
  std::vector<uint32_t> order(v.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return key(v[a]) != key(v[b]) ? key(v[a]) > key(v[b]) : a < b;
  });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

// The q4 codec's payload of k <= 1024 numbers, without the bytes that hold no number.
Bytes q4_values(const Floats& values) {
  const uint32_t k = static_cast<uint32_t>(values.size()), b = (k + 31) / 32;
  const Runner q4 = runner("q4", {k});
  const Bytes whole =
      q4.encode(Isa::kScalar, gradient_of(q4, values), Buffer()).payload.as<uint8_t>();
  Bytes result(whole.begin(), whole.begin() + 16 * (b - 1) + std::min(k - 32 * (b - 1), 16u));
  result.insert(result.end(), whole.begin() + 16 * b, whole.begin() + 17 * b + 1);
  return result;
}

Bytes value_bytes(const Floats& values, bool q4) {
  if (q4) return q4_values(values);
  Bytes result;
  for (const float x : values) {
    uint16_t half = bf16_bits(x);
    if ((half & 0x7fff) == 0x7f80) half = static_cast<uint16_t>(half - 1);
    if (half == 0x8000) half = 0;
    result.push_back(static_cast<uint8_t>(half & 255));
    result.push_back(static_cast<uint8_t>(half >> 8));
  }
  return result;
}

Bytes position_bytes(const std::vector<uint32_t>& chosen, uint32_t n) {
  const size_t k = chosen.size(), bitmap_bytes = (n + 7) / 8, index_bytes = (12 * k + 7) / 8;
  Bytes result(std::min(bitmap_bytes, index_bytes), 0);
  for (size_t j = 0; j < k; ++j) {
    if (bitmap_bytes < index_bytes) {
      result[chosen[j] / 8] |= static_cast<uint8_t>(1 << chosen[j] % 8);
      continue;
    }
    for (size_t bit = 0; bit < 12; ++bit) {
      const size_t at = 12 * j + bit;
      result[at / 8] |= static_cast<uint8_t>((chosen[j] >> bit & 1) << at % 8);
    }
  }
  return result;
}

Bytes reference_payload(const Floats& v, double ratio, bool q4) {
  const uint32_t n = static_cast<uint32_t>(v.size()), k = kept(n, ratio);
  const bool finite = std::all_of(v.begin(), v.end(), [](float x) { return std::isfinite(x); });
  const std::vector<uint32_t> chosen = largest(v, k);
  Floats values;
  for (const uint32_t i : chosen) values.push_back(finite ? v[i] : 0.0f);
  Bytes result = value_bytes(values, q4);
  const size_t num_values = result.size();
  const Bytes positions = position_bytes(chosen, n);
  result.insert(result.end(), positions.begin(), positions.end());
  if (!finite) {
    std::fill(result.begin(), result.end(), uint8_t{0});
    if (q4) result[num_values - 1] = 255;
    if (!q4) result[0] = 0xc0, result[1] = 0x7f;
  }
  result.resize((result.size() + 15) / 16 * 16, 0);
  return result;
}

struct Variant {
  std::string codec;
  double ratio, owner_ratio;
  bool q4;
};
// 341 of 4096 indices take as many bytes as a bitmap; of 342 the bitmap is smaller.
const Variant kVariants[] = {
    {"topk", 0.01, 0.04, false},
    {"topk:ratio=0.001,owner_ratio=0.25", 0.001, 0.25, false},
    {"topk:ratio=0.08325,owner_ratio=0.0835", 0.08325, 0.0835, false},
    {"topk:ratio=0.0835", 0.0835, 0.25, false},
    {"topk:ratio=0.25", 0.25, 0.25, false},
    {"topk:ratio=0.02,values=q4", 0.02, 0.08, true},
    {"topk:ratio=0.25,values=q4", 0.25, 0.25, true},
};

std::vector<uint32_t> sizes() {
  std::vector<uint32_t> result(300);
  std::iota(result.begin(), result.end(), 1u);
  for (const uint32_t n : {511u, 1000u, 2047u, 2049u, 4079u, 4080u, 4081u}) result.push_back(n);
  for (const uint32_t n : {4093u, 4094u, 4095u, 4096u}) result.push_back(n);
  return result;
}

// Both stages of v, tile by tile. The owner codes exactly its residual when all payloads are zero.
void expect_reference_bytes(const Variant& variant, const Runner& run, const Floats& v) {
  Floats finite = v;
  for (float& x : finite) x = std::isfinite(x) ? x : 1.0f;
  Bytes worker, owner;
  for (const Tile& tile : run.tiles()) {
    const auto first = static_cast<ptrdiff_t>(tile.gradient_offset);
    const auto end = first + static_cast<ptrdiff_t>(tile.num_elements);
    const Bytes w =
        reference_payload({v.begin() + first, v.begin() + end}, variant.ratio, variant.q4);
    const Bytes o = reference_payload({finite.begin() + first, finite.begin() + end},
                                      variant.owner_ratio, variant.q4);
    worker.insert(worker.end(), w.begin(), w.end());
    owner.insert(owner.end(), o.begin(), o.end());
  }
  for (const Isa isa : available_isas()) {
    ASSERT_EQ(run.encode(isa, gradient_of(run, v), Buffer()).payload.as<uint8_t>(), worker)
        << variant.codec << " " << isa_name(isa);
    const Buffer zeros(worker.size(), 0, 0);
    ASSERT_EQ(run.reduce(isa, {zeros}, run.residual_from(finite)).payload.as<uint8_t>(), owner)
        << variant.codec << " " << isa_name(isa);
  }
}

TEST(TopkCodec, WritesTheBytesOfASecondDerivationInBothStages) {
  for (const Variant& variant : kVariants) {
    const Runner run = runner(variant.codec, sizes());
    for (const Input input : kInputs) {
      SCOPED_TRACE("input " + std::to_string(static_cast<int>(input)));
      expect_reference_bytes(variant, run, floats(input, run.num_elements(), 5));
    }
  }
}

TEST(TopkCodec, TiesGoToTheLowerPositionWhateverTheirNumber) {
  for (const Variant& variant : kVariants) {
    const Runner run = runner(variant.codec, {4096, 4095, 777, 100, 3});
    const size_t n = run.num_elements();
    for (const uint32_t num_larger : {0u, 1u, 40u, 41u, 42u, 163u, 400u, 1023u, 1024u}) {
      for (const float tied : {1.0f, 0.0f, 0x1p-149f, FLT_MAX}) {
        Floats v(n);
        for (size_t i = 0; i < n; ++i) v[i] = i % 3 == 1 ? -tied : tied;
        // Larger ones at the end of each tile: all of them come before any tie.
        for (const Tile& tile : run.tiles()) {
          for (uint32_t j = 0; j < std::min(num_larger, tile.num_elements); ++j) {
            v[tile.gradient_offset + tile.num_elements - 1 - j] = tied == FLT_MAX ? -tied : -2.0f;
          }
        }
        expect_reference_bytes(variant, run, v);
      }
    }
  }
}

TEST(TopkCodec, KeepsAsManyAsDocumentedAndNoByteMore) {
  EXPECT_EQ(kept(4096, 0.01), 41u);
  EXPECT_EQ(kept(150, 0.01), 2u);  // halves round up
  EXPECT_EQ(kept(149, 0.01), 1u);
  EXPECT_EQ(runner("topk", {1}).payload_bytes(4096, Stage::kWorker), 144u);           // 82 + 62
  EXPECT_EQ(runner("topk", {1}).payload_bytes(4096, Stage::kOwner), 576u);            // 328 + 246
  EXPECT_EQ(runner("topk:values=q4", {1}).payload_bytes(4096, Stage::kWorker), 96u);  // 28 + 62
  for (const Variant& variant : kVariants) {
    const Runner run = runner(variant.codec, {1});
    for (uint32_t n = 1; n <= kTileElements; ++n) {
      for (const Stage stage : {Stage::kWorker, Stage::kOwner}) {
        const uint32_t k = kept(n, stage == Stage::kOwner ? variant.owner_ratio : variant.ratio);
        const uint32_t b = (k + 31) / 32;
        const uint32_t values =
            variant.q4 ? 16 * (b - 1) + std::min(k - 32 * (b - 1), 16u) + b + 1 : 2 * k;
        const uint32_t positions = std::min((n + 7) / 8, (12 * k + 7) / 8);
        ASSERT_EQ(run.payload_bytes(n, stage), (values + positions + 15) / 16 * 16) << n;
      }
    }
  }
}

TEST(TopkCodec, OwnerKeepsFourTimesAsManyUnlessToldAndNeverFewer) {
  const auto owner_bytes = [](const std::string& codec) {
    return runner(codec, {1}).payload_bytes(4096, Stage::kOwner);
  };
  EXPECT_EQ(owner_bytes("topk:ratio=0.02"), owner_bytes("topk:ratio=0.02,owner_ratio=0.08"));
  EXPECT_EQ(owner_bytes("topk:ratio=0.1"), owner_bytes("topk:ratio=0.1,owner_ratio=0.25"));
  EXPECT_NO_THROW(runner("topk:ratio=0.02,owner_ratio=0.02", {1}));
  try {
    runner("topk:ratio=0.02,owner_ratio=0.01", {1});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_NE(std::string(error.what()).find("owner_ratio is 0.01, less than ratio"),
              std::string::npos);
  }
}

TEST(TopkCodec, NonFiniteElementMakesTheWholeTileNanAndKeepsItsResidual) {
  for (const Variant& variant : kVariants) {
    const Runner run = runner(variant.codec, {4096, 1000, 4096});
    const Floats old = make_residual(Input::kGaussian, run.num_elements(), 4);
    for (const float poison : {NAN, INFINITY, -INFINITY}) {
      Floats v = floats(Input::kGaussian, run.num_elements(), 3);
      v[4096 + 999] = poison;
      for (const Isa isa : available_isas()) {
        const Result r = run.encode(isa, gradient_of(run, v), run.residual_from(old));
        const Floats updated = r.residual.as<float>();
        const Result d = run.decode(isa, r.payload, Buffer(), Stage::kWorker);
        const Floats decoded = d.gradient.as<float>();
        for (size_t i = 0; i < v.size(); ++i) {
          const bool poisoned = i >= 4096 && i < 4096 + 1000;
          ASSERT_EQ(float_bits(decoded[i]) == kNan, poisoned) << i;
          if (poisoned) {
            ASSERT_EQ(float_bits(updated[i]), float_bits(old[i])) << i;
          }
        }
        EXPECT_EQ(d.status[0].flags, 0u);
        EXPECT_EQ(d.status[1].flags, kTileNonFinite);
      }
    }
  }
}

// The largest k hold at least k / n of the power. Rounding to bf16 moves a kept value by at most
// 2^-8 of itself (2^-9, but for saturation at the top) or, below the normal numbers, 2^-134. q4
// leaves at most 0.062 of the power of what it codes (see q4_test.cpp; not at the bottom of fp32).
TEST(TopkCodec, ErrorIsAContraction) {
  for (const Variant& variant : kVariants) {
    for (const Input input : {Input::kGaussian, Input::kHeavyTail, Input::kHuge, Input::kTies,
                              Input::kSparse, Input::kTiny}) {
      if (variant.q4 && input == Input::kTiny) continue;
      for (const uint32_t n : {10u, 1000u, 4096u}) {
        const Runner run = runner(variant.codec, {n});
        const Floats v = floats(input, n, n);
        const Result r = run.encode(active_isa(), gradient_of(run, v), Buffer());
        const Floats d =
            run.decode(active_isa(), r.payload, Buffer(), Stage::kWorker).gradient.as<float>();
        double power = 0, error = 0;
        for (uint32_t i = 0; i < n; ++i) {
          power += std::pow(double(v[i]), 2);
          error += std::pow(double(v[i]) - d[i], 2);
        }
        const uint32_t k = kept(n, variant.ratio);
        const double rounding = (variant.q4 ? 0.062 : 0x1p-16) * power + k * 0x1p-268;
        EXPECT_LE(error, (1 - double(k) / n) * power + rounding + 1e-12 * power) << variant.codec;
      }
    }
  }
}

}  // namespace
}  // namespace gradferry::testing
