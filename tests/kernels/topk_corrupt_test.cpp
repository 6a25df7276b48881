// What the topk codec makes of payloads that no encoder writes.
#include <gtest/gtest.h>

#include <functional>

#include "tests/kernels/codec_runner.h"
#include "tests/kernels/inputs.h"

namespace gradferry::testing {
namespace {

constexpr uint32_t kNan = 0x7fc00000u;

// The middle one of three tiles with n elements, of which k are kept.
struct Target {
  std::string codec;
  uint32_t n, k, values_bytes;
};
const Target kIndices = {"topk", 4000, 40, 80};
const Target kOddIndices = {"topk", 4096, 41, 82};
const Target kBitmap = {"topk:ratio=0.25", 3001, 750, 1500};
const Target kIndicesQ4 = {"topk:values=q4", 4000, 40, 16 + 8 + 2 + 1};
const Target kBitmapQ4 = {"topk:ratio=0.25,values=q4", 3001, 750, 23 * 16 + 14 + 24 + 1};

class Victim {
 public:
  explicit Victim(const Target& target) : target_(target), run_(runner(target)) {
    const Buffer gradient =
        run_.gradient_from(make_input(Input::kGaussian, run_.num_elements(), 17));
    good_ = run_.encode(Isa::kScalar, gradient, Buffer()).payload;
    before_ = run_.decode(Isa::kScalar, good_, Buffer(), Stage::kWorker).gradient.as<float>();
  }

  uint32_t num_bytes() const { return run_.payload_bytes(target_.n, Stage::kWorker); }

  // Flags of the middle tile once `damage` has been at its payload. All instruction sets agree; the
  // tiles around it are as before; a tile that is flagged is canonical NaN all over.
  uint32_t flags_after(const std::function<void(std::byte*)>& damage) const {
    Buffer bad = good_;
    damage(bad.data() + run_.tiles()[1].payload_offset);
    const Result first = run_.decode(Isa::kScalar, bad, Buffer(), Stage::kWorker);
    const uint32_t flags = first.status[1].flags;
    const std::vector<float> after = first.gradient.as<float>();
    for (size_t i = 0; i < after.size(); ++i) {
      const bool inside = i >= 100 && i < 100 + target_.n;
      if (inside) {
        EXPECT_EQ(float_bits(after[i]) == kNan, flags != 0) << i;
        EXPECT_NE(float_bits(after[i]), 0x80000000u) << i;
      } else {
        EXPECT_EQ(float_bits(after[i]), float_bits(before_[i])) << i;
      }
    }
    const Buffer residual(run_.num_elements() * sizeof(float), 0, 0);
    for (const Isa isa : available_isas()) {
      const Result decoded = run_.decode(isa, bad, Buffer(), Stage::kWorker);
      EXPECT_TRUE(decoded.gradient == first.gradient);
      EXPECT_EQ(decoded.status[1].flags, flags);
      const Result reduced = run_.reduce(isa, {good_, bad}, residual);
      EXPECT_EQ(reduced.status[1].flags, flags);
      for (const float x : reduced.residual.as<float>()) EXPECT_TRUE(std::isfinite(x));
    }
    return flags;
  }
  bool is_corrupt(const std::function<void(std::byte*)>& damage) const {
    const uint32_t flags = flags_after(damage);
    EXPECT_TRUE(flags == 0 || flags == (kTileCorrupt | kTileNonFinite));
    return flags != 0;
  }

 private:
  static Runner runner(const Target& target) {
    CallSetup setup;
    setup.codec = target.codec;
    setup.sizes = {100, target.n, 33};
    return Runner(setup);
  }

  Target target_;
  Runner run_;
  Buffer good_;
  std::vector<float> before_;
};

uint32_t index_at(const std::byte* indices, uint32_t j) {
  const uint32_t at = 12 * j / 8;
  const uint32_t two = static_cast<uint32_t>(indices[at]) | static_cast<uint32_t>(indices[at + 1])
                                                                << 8;
  return two >> 12 * j % 8 & 0xfff;
}

void set_index(std::byte* indices, uint32_t j, uint32_t index) {
  for (uint32_t bit = 0; bit < 12; ++bit) {
    const uint32_t at = 12 * j + bit;
    const std::byte mask{static_cast<uint8_t>(1 << at % 8)};
    indices[at / 8] = (index >> bit & 1) != 0 ? indices[at / 8] | mask : indices[at / 8] & ~mask;
  }
}

TEST(TopkCorrupt, IndicesMustIncreaseAndStayInsideTheTile) {
  for (const Target& target : {kIndices, kOddIndices, kIndicesQ4}) {
    const Victim victim(target);
    const auto set = [&](uint32_t j, const std::function<uint32_t(const std::byte*)>& index) {
      return victim.is_corrupt([&](std::byte* payload) {
        std::byte* indices = payload + target.values_bytes;
        set_index(indices, j, index(indices));
      });
    };
    for (const uint32_t j : {0u, 1u, 2u, 20u, target.k - 2}) {
      const auto next = [&](const std::byte* indices) { return index_at(indices, j + 1); };
      EXPECT_TRUE(set(j, next)) << j;
      EXPECT_TRUE(set(j, [&](const std::byte* indices) { return next(indices) + 1; })) << j;
      EXPECT_FALSE(set(j, [&](const std::byte* indices) { return next(indices) - 1; })) << j;
      EXPECT_TRUE(set(j, [](const std::byte*) { return 0xfffu; })) << j;
    }
    EXPECT_FALSE(set(target.k - 1, [&](const std::byte*) { return target.n - 1; }));
    if (target.n < 4096) {
      EXPECT_TRUE(set(target.k - 1, [&](const std::byte*) { return target.n; }));
      EXPECT_TRUE(set(target.k - 1, [&](const std::byte*) { return 4095u; }));
    }
    EXPECT_TRUE(set(target.k - 1, [&](const std::byte*) { return 0u; }));
  }
  const Victim odd(kOddIndices);
  EXPECT_TRUE(odd.is_corrupt([](std::byte* payload) { payload[82 + 61] |= std::byte(0x10); }));
}

TEST(TopkCorrupt, BitmapMustHoldKeptElementsAndNothingBeyond) {
  for (const Target& target : {kBitmap, kBitmapQ4}) {
    const Victim victim(target);
    for (uint32_t i = 0; i < 8 * ((target.n + 7) / 8); i += i < 2990 ? 97 : 1) {
      EXPECT_TRUE(victim.is_corrupt([&](std::byte* payload) {
        payload[target.values_bytes + i / 8] ^= std::byte(1 << i % 8);
      })) << i;
    }
    // The right number of ones, but one of them beyond the tile.
    EXPECT_TRUE(victim.is_corrupt([&](std::byte* payload) {
      std::byte* bitmap = payload + target.values_bytes;
      uint32_t byte = 0;
      while (bitmap[byte] == std::byte(0)) ++byte;
      bitmap[byte] &= std::byte(static_cast<uint8_t>(bitmap[byte]) - 1);
      bitmap[(target.n - 1) / 8] |= std::byte(0x80);
    }));
  }
}

TEST(TopkCorrupt, ValuesMustBeFinite) {
  for (const Target& target : {kIndices, kBitmap}) {
    const Victim victim(target);
    for (const uint32_t j : {0u, 1u, 17u, target.k - 1}) {
      for (const uint32_t half : {0x7f80u, 0xff80u, 0x7fc0u, 0x7f81u, 0xffffu}) {
        EXPECT_TRUE(victim.is_corrupt([&](std::byte* payload) {
          payload[2 * j] = std::byte(half & 255);
          payload[2 * j + 1] = std::byte(half >> 8);
        })) << half;
      }
      EXPECT_FALSE(victim.is_corrupt([&](std::byte* payload) {  // -0 is taken for +0
        payload[2 * j] = std::byte(0);
        payload[2 * j + 1] = std::byte(0x80);
      }));
    }
  }
  for (const Target& target : {kIndicesQ4, kBitmapQ4}) {
    const Victim victim(target);
    const uint32_t blocks = (target.k + 31) / 32;
    for (uint32_t i = target.values_bytes - 1 - blocks; i < target.values_bytes; ++i) {
      EXPECT_TRUE(victim.is_corrupt([&](std::byte* payload) { payload[i] = std::byte(0xff); }));
      EXPECT_TRUE(victim.is_corrupt([&](std::byte* payload) { payload[i] = std::byte(3); }));
    }
    for (uint32_t i = 0; i < 16; ++i) {  // any code will do, 8 (-0) is taken for +0
      EXPECT_FALSE(victim.is_corrupt([&](std::byte* payload) { payload[i] = std::byte(0x88); }));
    }
  }
}

TEST(TopkCorrupt, ZeroPayloadIsZeroAndTheMarkerStandsAlone) {
  for (const Target& target : {kIndices, kOddIndices, kBitmap, kIndicesQ4, kBitmapQ4}) {
    const Victim victim(target);
    const bool q4 = target.codec.find("q4") != std::string::npos;
    const auto marker = [&](std::byte* payload) {
      std::memset(payload, 0, victim.num_bytes());
      payload[q4 ? target.values_bytes - 1 : 1] = q4 ? std::byte(0xff) : std::byte(0x7f);
      if (!q4) payload[0] = std::byte(0xc0);
    };
    EXPECT_EQ(victim.flags_after([&](std::byte* p) { std::memset(p, 0, victim.num_bytes()); }), 0u);
    EXPECT_EQ(victim.flags_after(marker), kTileNonFinite);
    const uint32_t used =
        target.values_bytes + std::min((target.n + 7) / 8, (3 * target.k + 1) / 2);
    for (const uint32_t i : {2u, target.values_bytes / 2, target.values_bytes, used - 1}) {
      EXPECT_TRUE(victim.is_corrupt([&](std::byte* payload) {
        marker(payload);
        payload[i] = std::byte(1);
      })) << i;
      EXPECT_TRUE(victim.is_corrupt([&](std::byte* payload) {
        std::memset(payload, 0, victim.num_bytes());
        payload[i] = std::byte(1);
      })) << i;
    }
  }
}

TEST(TopkCorrupt, FlippedBitsAreFoundOrHarmless) {
  std::mt19937_64 random(11);
  for (const Target& target : {kIndices, kOddIndices, kBitmap, kIndicesQ4, kBitmapQ4}) {
    const Victim victim(target);
    int num_corrupt = 0;
    for (int round = 0; round < 300; ++round) {
      num_corrupt += victim.is_corrupt([&](std::byte* payload) {
        for (int flips = 1 + round % 3; flips > 0; --flips) {
          payload[random() % victim.num_bytes()] ^= std::byte(1 << random() % 8);
        }
      });
    }
    EXPECT_GT(num_corrupt, 0) << target.codec;
    EXPECT_LT(num_corrupt, 300) << target.codec;
  }
}

}  // namespace
}  // namespace gradferry::testing
