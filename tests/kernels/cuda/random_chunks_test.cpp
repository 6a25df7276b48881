// Chunks of random codecs, sizes, numbers and factors, within what device_library.h allows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "tests/kernels/cuda/chunk_run.h"

namespace gradferry::testing {
namespace {

class RandomChunk {
 public:
  explicit RandomChunk(uint64_t seed) : random_(seed) {}

  ChunkSetup setup() {
    ChunkSetup s;
    s.codecs.clear();
    const bool is_float64 = chance(8);
    s.dtype = is_float64 ? ScalarType::kFloat64 : static_cast<ScalarType>(below(3));
    const std::vector<std::string> all = all_codecs();
    for (uint64_t i = 0, n = chance(50) ? 1 : 1 + below(6); !is_float64 && i < n; ++i) {
      s.codecs.push_back(all[below(all.size())]);
    }
    if (is_float64 || chance(60)) s.codecs.emplace_back("exact");
    s.sizes.clear();
    for (uint64_t i = 0, n = 1 + below(9); i < n; ++i) s.sizes.push_back(size());
    s.world_size = static_cast<uint32_t>(1 + below(5));
    s.hold_zero_tiles = chance(50);
    s.misaligned = chance(50);
    s.bare = static_cast<uint32_t>(below(5));
    s.alpha = one_of({1.0f, 1.0f, 0.5f, 0.1f, 0x1p-16f});
    s.beta = one_of({0.0f, 0.0f, 0.9f, 1.0f, -1.0f, 1e30f});
    s.gain = one_of({1.0f, 1.0f, 0.5f, 2.0f, 1024.0f, 0x1p-16f, 3e-39f, 1e30f});
    s.input = kInputs[below(std::size(kInputs))];
    s.input_of_rank_0 = kInputs[below(std::size(kInputs))];
    return s;
  }

  // Any bits instead of a rank's numbers.
  void scramble(Buffer& gradient) {
    for (size_t i = 0; i < gradient.size(); ++i) gradient.data()[i] = std::byte(random_() & 255);
  }
  bool chance(uint32_t percent) { return below(100) < percent; }

 private:
  uint64_t below(uint64_t n) { return random_() % n; }
  float one_of(std::initializer_list<float> values) { return values.begin()[below(values.size())]; }
  uint32_t size() {
    if (chance(20)) return kTileElements;
    // Around where warps, groups and tiles end.
    if (chance(60)) {
      const auto edge = static_cast<uint32_t>(std::min<uint64_t>(16u << below(9), kTileElements));
      return static_cast<uint32_t>(std::min<uint64_t>(edge - 1 + below(3), kTileElements));
    }
    return static_cast<uint32_t>(1 + below(kTileElements));
  }

  std::mt19937_64 random_;
};

TEST(RandomChunks, GiveTheBytesOfTheHost) {
  const uint64_t rounds = effort() == Effort::kFewTiles ? 40 : 1500;
  for (uint64_t seed = 1; seed <= rounds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomChunk random(seed);
    ChunkRun run(random.setup());
    for (Rank& rank : run.ranks) {
      if (random.chance(30)) random.scramble(rank.gradient);
    }
    expect_bytes_of_the_host(run);
  }
}

}  // namespace
}  // namespace gradferry::testing
