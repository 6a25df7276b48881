// A bucket's plan where counts no longer fit 32 bits. It is tables alone: no gradient is allocated.
// Plans of buckets of usual sizes are in tests/fuzz/plan_fuzz.cpp.
#include "hooks/protocol/plan.h"

#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "hooks/protocol/defaults.h"

namespace gradferry {
namespace {

constexpr uint64_t kHugeElements = (uint64_t{1} << 31) + 5000;
constexpr uint32_t kLastElements = 64;
constexpr uint64_t kElements = 2 * kHugeElements + kLastElements;
constexpr uint32_t kWorldSize = 3;

ParameterSpec huge(const char* name, bool residuals) {
  return {.name = name,
          .num_elements = kHugeElements,
          .dtype = ScalarType::kBFloat16,
          .codec = "q4",
          .warmup = "exact",
          .worker_residual = residuals,
          .owner_residual = residuals};
}

// The second one begins beyond 2^31 elements of the bucket, the last one beyond 2^32.
Layout huge_layout(uint32_t rank) {
  ParameterSpec last = huge("last", true);
  last.num_elements = kLastElements;
  return {{huge("first", true), huge("second", true), last}, rank, Nodes::flat(kWorldSize)};
}

BucketPlan huge_plan(const Layout& layout, uint32_t rank) {
  return make_plan(layout, {0, 1, 2},
                   {.rank = rank,
                    .chunk_bytes = kChunkBytes,
                    .equal_scatter = false,
                    .codecs = CodecChoice::kOwn,
                    .residuals = true});
}

TEST(HugeParameter, LayoutCountsItsTilesAndResiduals) {
  const Layout layout = huge_layout(0);
  const uint64_t tiles = kHugeElements / kTileElements + 1;
  ASSERT_EQ(layout.num_tiles(), 2 * tiles + 1);
  for (const Parameter& parameter : std::span(layout.parameters()).first(2)) {
    EXPECT_EQ(parameter.num_elements, kHugeElements);
    ASSERT_EQ(parameter.num_tiles, tiles);
    EXPECT_EQ(layout.tile_elements(parameter, parameter.num_tiles - 2), kTileElements);
    // 2^31 is whole tiles, and so is all of 5000 but 904 elements.
    EXPECT_EQ(layout.tile_elements(parameter, parameter.num_tiles - 1), 904);
  }
  const uint64_t aligned = (kHugeElements + 15) / 16 * 16;
  EXPECT_EQ(layout.worker_residual_range(layout.parameters()[1]).begin, aligned);
  EXPECT_EQ(layout.worker_residual_range(layout.parameters()[2]).begin, 2 * aligned);
  EXPECT_EQ(layout.worker_residual_elements(), 2 * aligned + kLastElements);
  EXPECT_GT(layout.worker_residual_elements(), uint64_t{UINT32_MAX});
  // Of equal tiles every rank gets a third, to within one; three tiles are shorter.
  EXPECT_NEAR(static_cast<double>(layout.owner_residual_elements()),
              static_cast<double>(kElements) / kWorldSize, 4 * kTileElements);
}

TEST(HugeParameter, PlanHasEveryElementOnceWhereItLies) {
  const Layout layout = huge_layout(1);
  const BucketPlan plan = huge_plan(layout, 1);
  EXPECT_EQ(plan.num_elements, kElements);
  uint64_t id = 0, element = 0;
  auto parameter = layout.parameters().begin();
  uint64_t residual_begin = 0;
  for (const ChunkPlan& chunk : plan.chunks) {
    ASSERT_EQ(chunk.encode.size(), 1);
    ASSERT_EQ(chunk.decode.size(), 1);
    ASSERT_EQ(chunk.encode[0].tiles.size(), chunk.decode[0].tiles.size());
    for (size_t i = 0; i < chunk.encode[0].tiles.size(); ++i, ++id) {
      if (id == parameter->first_tile + parameter->num_tiles) {
        residual_begin = layout.worker_residual_range(*++parameter).begin;
      }
      const uint64_t in_parameter = (id - parameter->first_tile) * kTileElements;
      for (const Tile& tile : {chunk.encode[0].tiles[i], chunk.decode[0].tiles[i]}) {
        ASSERT_EQ(tile.id, id);
        ASSERT_EQ(tile.gradient_offset, element);
        ASSERT_EQ(tile.residual_offset, residual_begin + in_parameter);
      }
      element += chunk.encode[0].tiles[i].num_elements;
    }
  }
  EXPECT_EQ(id, layout.num_tiles());
  EXPECT_EQ(element, kElements);
}

TEST(HugeParameter, MoreTilesThanCanBeNumberedAreRefusedByName) {
  ParameterSpec spec = huge("everything", false);
  spec.num_elements = uint64_t{1} << 45;
  try {
    const Layout layout({spec}, 0, Nodes::flat(kWorldSize));
    FAIL() << "it was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_NE(std::string(error.what()).find("'everything' has 35184372088832 elements"),
              std::string::npos)
        << error.what();
  }
}

// --- padding of messages to owners

ParameterSpec exact(uint64_t num_elements, std::optional<uint32_t> owner = std::nullopt) {
  return {.name = "weight",
          .num_elements = num_elements,
          .dtype = ScalarType::kFloat32,
          .codec = "exact",
          .warmup = "exact",
          .worker_residual = false,
          .owner_residual = false,
          .owner = owner};
}

BucketPlan plan_of(const std::vector<ParameterSpec>& parameters, uint32_t world_size,
                   const PlanOptions& options) {
  std::vector<uint32_t> all(parameters.size());
  std::iota(all.begin(), all.end(), 0);
  return make_plan({parameters, options.rank, Nodes::flat(world_size)}, all, options);
}

// Of messages to two owners, each of whom has one of two parameters.
std::vector<uint32_t> scatter_sizes(uint64_t second_elements, uint32_t chunk_bytes,
                                    bool equal_scatter) {
  const BucketPlan plan = plan_of({exact(4096), exact(second_elements)}, 2,
                                  {.rank = 0,
                                   .chunk_bytes = chunk_bytes,
                                   .equal_scatter = equal_scatter,
                                   .codecs = CodecChoice::kOwn,
                                   .residuals = false});
  EXPECT_EQ(plan.chunks.size(), 1);
  std::vector<uint32_t> sizes;
  for (const Shard& shard : plan.chunks[0].shards) sizes.push_back(shard.scatter_bytes);
  return sizes;
}

// A tile for each of two ranks, the second one of n elements. Padding is 4 (4096 - n) bytes of
// 2 * 64 + 4 (4096 + n): at most 1/32 from n = 3848 on, as sizes are multiples of 16.
TEST(EqualScatter, PadsWhereThatIsAtMostAThirtySecond) {
  using Sizes = std::vector<uint32_t>;
  EXPECT_EQ(scatter_sizes(3848, kChunkBytes, true), (Sizes{64 + 16384, 64 + 16384}));
  EXPECT_EQ(scatter_sizes(3844, kChunkBytes, true), (Sizes{64 + 16384, 64 + 15376}));
  EXPECT_EQ(scatter_sizes(3848, kChunkBytes, false), (Sizes{64 + 16384, 64 + 15392}));
  // Buffers have room for one message that is longer than a chunk, not for one to every rank.
  EXPECT_EQ(scatter_sizes(4092, 16368, true), (Sizes{64 + 16384, 64 + 16368}));
}

// --- a reduce-scatter

// The bucket has all of a rank first: tiles of a weight, and 21 elements of a bias, padded to 96
// bytes. Chunks have two tiles of every rank that has any left.
TEST(ReduceScatter, ShardsOfAnyLengthAreDealtInTurns) {
  constexpr uint32_t kTileBytes = kTileElements * sizeof(float);
  std::vector<ParameterSpec> shards;
  for (const uint32_t rank : {0U, 1U, 2U}) {
    constexpr uint64_t kTiles[] = {0, 1, 4};
    shards.push_back(exact(kTiles[rank] * kTileElements, rank));
    shards.push_back(exact(21, rank));
  }
  const BucketPlan plan = plan_of(shards, kWorldSize,
                                  {.rank = 1,
                                   .chunk_bytes = 2 * kTileBytes,
                                   .equal_scatter = false,
                                   .codecs = CodecChoice::kOwn,
                                   .residuals = false,
                                   .collective = Collective::kReduceScatter});
  std::vector<std::vector<uint32_t>> sizes;  // by chunk and rank
  for (const ChunkPlan& chunk : plan.chunks) {
    std::vector<uint32_t>& of_chunk = sizes.emplace_back();
    for (const Shard& each : chunk.shards) of_chunk.push_back(each.worker_bytes);
  }
  EXPECT_EQ(sizes, (std::vector<std::vector<uint32_t>>{
                       {96, kTileBytes + 96, 2 * kTileBytes}, {0, 0, 2 * kTileBytes}, {0, 0, 96}}));
}

}  // namespace
}  // namespace gradferry
