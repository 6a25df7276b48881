// Every codec's kernels, run by a GPU or by the machine of tests/kernels/ptx, give the bytes of the
// CPU codec: messages with their checksums, gradients, residuals, and what is found wrong. A chunk
// has one codec here; chunk_kernels_test.cpp has mixtures.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <utility>

#include "tests/kernels/cuda/chunk_run.h"

namespace gradferry::testing {
namespace {

// The contract's sizes, and whole tiles; or every fourth of them, some of every kind; or a whole
// tile, a ragged one, one of about a block, a tiny one.
std::vector<uint32_t> some_sizes(uint32_t index) {
  if (effort() == Effort::kFewTiles) {
    constexpr uint32_t kRagged[] = {4095, 1025, 3000, 2047, 1023, 4080, 515, 1500};
    constexpr uint32_t kBlocks[] = {31, 33, 127, 129, 128, 130, 32, 100};
    return {kTileElements, kRagged[index], kBlocks[index], 1 + index};
  }
  const std::vector<uint32_t> all = edge_sizes();
  const uint32_t stride = effort() == Effort::kAllTiles ? 1 : 4;
  std::vector<uint32_t> sizes = {kTileElements};
  for (size_t i = index % stride; i < all.size(); i += stride) sizes.push_back(all[i]);
  return sizes;
}

class Kernels : public ::testing::TestWithParam<Case> {
 protected:
  static ChunkSetup setup(std::vector<uint32_t> sizes, Input input = Input::kGaussian) {
    ChunkSetup result;
    result.codecs = {GetParam().codec};
    result.dtype = GetParam().dtype;
    result.sizes = std::move(sizes);
    result.world_size = 2;
    result.input = result.input_of_rank_0 = input;
    return result;
  }
};

// Half of the inputs at misaligned gradients. Of every fourth size, each meets two inputs.
TEST_P(Kernels, GiveTheBytesOfTheHost) {
  for (const Input input : kInputs) {
    const auto index = static_cast<uint32_t>(input);
    ChunkSetup s = setup(some_sizes(index), input);
    s.misaligned = index % 2 == 1;
    s.bare = index % 3;
    s.alpha = s.misaligned ? 0.1f : 1.0f;
    s.gain = s.misaligned ? 0.5f : 1.0f;
    s.beta = 0.9f;
    s.hold_zero_tiles = index % 4 >= 2;
    SCOPED_TRACE("input " + std::to_string(index));
    expect_bytes_of_the_host(ChunkRun(s));
  }
}

TEST_P(Kernels, SumRanksInOrder) {
  for (const uint32_t world_size : {2u, 9u, 20u}) {
    ChunkSetup s = setup({5, 4096, 1030});
    s.world_size = world_size;
    s.bare = kNoTile;
    ChunkRun host(s);
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      // Three sizes far apart, so that a sum in another order is another one.
      const int exponent = (s.dtype == ScalarType::kFloat16 ? 7 : 20) * (int(rank % 3) - 1);
      std::vector<double> input = make_input(Input::kGaussian, host.num_elements(), 20 + rank);
      for (double& x : input) x = std::ldexp(x, exponent);
      host.set_gradient(rank, input);
    }
    host.until_reduce();
    ChunkRun kernels = by_kernels(host);
    expect_same_reduce(kernels, host);
  }
}

// A block's elements are added neighbours first: in any other tree the two small numbers, one at a
// time, are lost beside the large one, and the sum comes out on the other side of what a scale's
// rounding to 8 bits divides.
TEST_P(Kernels, SumElementsInTheStatedTree) {
  ChunkSetup s = setup({4096, 1000});
  s.world_size = 1;
  ChunkRun host(s);
  std::vector<double> input(host.num_elements(), 0.0);
  for (size_t block = 0; 128 * (block + 1) <= input.size(); ++block) {
    const size_t stride = size_t{1} << (block % 6);
    double* x = input.data() + 128 * block;
    x[0] = 1.0, x[stride] = 0x1p-8, x[2 * stride] = 0x1p-24, x[3 * stride] = 0x1p-24;
  }
  host.set_gradient(0, input);
  host.set_residuals(std::vector<float>(host.num_residuals(), 0.0f));
  ChunkRun kernels = by_kernels(host);
  expect_same_encode(kernels, host);
}

// A tile for each of two ranks: their buffers end where a tile's bytes do.
TEST_P(Kernels, StayInsideEveryBufferOfASingleTile) {
  std::vector<uint32_t> sizes = {4096, 129};
  if (effort() != Effort::kFewTiles) {
    sizes.insert(sizes.end(), {1, 2, 3, 31, 32, 127, 1000, 1025, 2047, 4079});
  }
  for (const uint32_t n : sizes) {
    ChunkSetup s = setup({n, n});
    s.misaligned = n % 2 == 1;
    s.beta = 0.5f;
    expect_bytes_of_the_host(ChunkRun(s));
  }
}

// A residual that is not replaced is converted to the present loss scale: in a unit that is not
// finite, and in a held zero tile. Each rank has a tile that is zero on the other alone, and
// another is zero but for its last element.
TEST_P(Kernels, HoldZeroTilesAndConvertTheResidualsTheyKeep) {
  for (const float gain : {0.5f, 2.0f}) {
    ChunkSetup s = setup({4096, 77, 4096, 130, 50, 1024});
    s.hold_zero_tiles = true;
    s.bare = gain > 1 ? kNoTile : kAllTiles;
    s.gain = gain;
    ChunkRun run(s);
    std::vector<double> input(run.num_elements(), 0.0);
    for (size_t i = 0; i < 4096 + 77; ++i) input[i] = double(NAN);
    for (size_t i = 4096 + 77; i < input.size(); i += 3) input[i] = -0.0;
    input[input.size() - 1025] = input[4096 + 77] = 0.125;
    run.set_gradient(0, input);
    std::swap(input[4096 + 77], input.back());
    run.set_gradient(1, input);
    if (s.bare == kNoTile) run.set_residuals(residual_beyond(gain, run.num_residuals(), 5));
    expect_bytes_of_the_host(run);
  }
}

TEST_P(Kernels, TakeEveryBitPatternOfSixteenBitGradients) {
  if (item_bytes(GetParam().dtype) != 2) GTEST_SKIP() << "only for 16-bit gradients";
  const uint32_t stride = effort() == Effort::kFewTiles ? 15 : 1;
  ChunkSetup s = setup(std::vector<uint32_t>(16 / stride, 4096));
  s.world_size = 1;
  s.bare = kAllTiles;
  ChunkRun run(s);
  for (uint32_t i = 0; i < run.num_elements(); ++i) {
    const auto pattern = static_cast<uint16_t>(stride * i);
    std::memcpy(run.ranks[0].gradient.data() + 2 * i, &pattern, 2);
  }
  expect_bytes_of_the_host(run);
}

// Random bytes in place of a payload; or a few, so that some of it is what encoders write, half of
// them 0x80, which q8 refuses where it counts, and ignores beyond the end of a tile; or a flipped
// bit of a header or of a payload, whose checksum is then wrong; or a message that is as it was.
void damage(std::mt19937_64& random, Buffer& buffer, const Message& message,
            const Envelope& envelope) {
  std::byte* header = buffer.data() + message.offset;
  std::byte* payload = header + kHeaderBytes;
  const uint64_t kind = random() % 5, place = random();
  if (kind == 2) header[place % kHeaderBytes] ^= std::byte(1 << random() % 8);
  if (kind == 3) payload[place % message.payload_bytes] ^= std::byte(1 << random() % 8);
  if (kind > 1) return;
  const size_t step = kind == 0 ? 1 : 13;
  for (size_t i = place % step; i < message.payload_bytes; i += step) {
    payload[i] = std::byte(step == 13 && random() % 2 == 0 ? 0x80 : random() & 255);
  }
  ChunkRun::seal(buffer, message, envelope, 0);
}

TEST_P(Kernels, JudgeDamagedMessagesAsTheHostDoes) {
  ChunkSetup s = setup({4096, 33, 1023, 1}, Input::kHeavyTail);
  s.alpha = 0.25f;
  s.beta = 0.9f;
  std::mt19937_64 random(5);
  for (int round = 0; round < (effort() == Effort::kFewTiles ? 5 : 15); ++round) {
    ChunkRun host(s);
    host.until_decode();
    for (uint32_t to = 0; to < 2; ++to) {
      for (uint32_t from = 0; from < 2; ++from) {
        Rank& r = host.ranks[to];
        damage(random, r.scattered, host.scattered(to, from), host.envelope(from, Phase::kScatter));
        damage(random, r.gathered, host.gathered(from), host.envelope(from, Phase::kGather));
      }
    }
    ChunkRun kernels = by_kernels(host);
    host.nonfinite_is_fault = kernels.nonfinite_is_fault = round % 2 == 1;
    expect_same_accumulate(kernels, host);
    expect_same_reduce(kernels, host);
    expect_same_decode(kernels, host);
  }
}

// 258 values and a bit for each of 1030 elements, of which one moves to where there is none.
TEST(Chunks, OfTopkHaveNoElementBehindTheEnd) {
  ChunkRun host({.codecs = {"topk:ratio=0.25"}, .sizes = {1030}});
  host.until_decode();
  Buffer& gathered = host.ranks[0].gathered;
  std::byte* last = gathered.data() + host.gathered(0).offset + kHeaderBytes + 2 * 258 + 128;
  std::byte* other = last - 1;
  while (*other == std::byte{0}) --other;
  *other &= std::byte(std::to_integer<uint32_t>(*other) - 1);
  *last |= std::byte{0x80};
  ChunkRun::seal(gathered, host.gathered(0), host.envelope(0, Phase::kGather), 0);
  ChunkRun kernels = by_kernels(host);
  expect_same_decode(kernels, host);
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, Kernels, ::testing::ValuesIn(all_cases()), case_name);

}  // namespace
}  // namespace gradferry::testing
