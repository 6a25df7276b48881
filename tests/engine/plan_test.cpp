// A bucket's plan where counts no longer fit 32 bits, where messages are padded, and between nodes
// that there cannot be. It is tables alone: no gradient is allocated. Worlds of usual sizes are
// simulated (tests/faults/sim).
#include "hooks/protocol/plan.h"

#include <gtest/gtest.h>

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

TEST(HugeParameter, PlanHasEveryElementOnceWhereItLies) {
  // The second one begins beyond 2^31 elements of the bucket, the last one beyond 2^32.
  ParameterSpec last = huge("last", true);
  last.num_elements = kLastElements;
  const Layout layout({huge("first", true), huge("second", true), last}, 1,
                      Nodes::flat(kWorldSize));
  const BucketPlan plan = make_plan(layout, {0, 1, 2},
                                    {.rank = 1,
                                     .chunk_bytes = kChunkBytes,
                                     .equal_scatter = false,
                                     .codecs = CodecChoice::kOwn,
                                     .residuals = true});
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
        ++parameter;
        residual_begin += (kHugeElements + 15) / 16 * 16;
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
  EXPECT_EQ(layout.worker_residual_elements(), residual_begin + kLastElements);
  // Of equal tiles every rank gets a third, to within one; three tiles are shorter.
  EXPECT_NEAR(static_cast<double>(layout.owner_residual_elements()),
              static_cast<double>(kElements) / kWorldSize, 4 * kTileElements);
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

ParameterSpec exact(uint64_t num_elements) {
  return {.name = "weight",
          .num_elements = num_elements,
          .dtype = ScalarType::kFloat32,
          .codec = "exact",
          .warmup = "exact",
          .worker_residual = false,
          .owner_residual = false};
}

// Of messages to two owners, each of whom has one of two parameters.
std::vector<uint32_t> scatter_sizes(uint64_t second_elements, uint32_t chunk_bytes,
                                    bool equal_scatter) {
  const Layout layout({exact(4096), exact(second_elements)}, 0, Nodes::flat(2));
  const BucketPlan plan = make_plan(layout, {0, 1},
                                    {.rank = 0,
                                     .chunk_bytes = chunk_bytes,
                                     .equal_scatter = equal_scatter,
                                     .codecs = CodecChoice::kOwn,
                                     .residuals = false});
  EXPECT_EQ(plan.chunks.size(), 1);
  std::vector<uint32_t> sizes;
  for (const PlannedMessage& m : plan.chunks[0].scattered) sizes.push_back(m.message_bytes);
  return sizes;
}

// A tile for each of two ranks, the second one of n elements. Padding is 4 (4096 - n) bytes of
// 2 * 64 + 4 (4096 + n): at most 1/32 from n = 3848 on, as sizes are multiples of 16.
TEST(EqualScatter, PadsWhereThatIsAtMostAThirtySecond) {
  using Sizes = std::vector<uint32_t>;
  EXPECT_EQ(scatter_sizes(3848, kChunkBytes, true), (Sizes{64 + 16384, 64 + 16384}));
  EXPECT_EQ(scatter_sizes(3844, kChunkBytes, true), (Sizes{64 + 16384, 64 + 15376}));
  EXPECT_EQ(scatter_sizes(3848, kChunkBytes, false), (Sizes{64 + 16384, 64 + 15392}));
}

// A tile for each of two ranks: 64 + 16384 bytes each in a stage.
TEST(RailBytes, AreTheMostOfMessagesWithTiles) {
  const Layout layout({exact(4096), exact(4096)}, 0, Nodes::flat(2));
  for (const uint64_t less : {0, 1}) {
    const BucketPlan plan = make_plan(layout, {0, 1},
                                      {.rank = 0,
                                       .chunk_bytes = 0,
                                       .equal_scatter = false,
                                       .codecs = CodecChoice::kOwn,
                                       .residuals = false,
                                       .rail_bytes = 2 * (64 + 16384) - less});
    EXPECT_EQ(plan.chunks.size(), 1 + less);
  }
}

// --- nodes

TEST(Nodes, TablesThatAreNoneAreRefused) {
  using Table = std::vector<std::vector<uint32_t>>;
  const std::vector<Table> wrong{{},         {{}},     {{0}, {}},     {{0, 0}},     {{0, 2}},
                                 {{1}, {0}}, {{1, 0}}, {{0}, {0, 1}}, {{0, 1}, {3}}};
  for (const Table& table : wrong) {
    EXPECT_THROW(Nodes nodes(table), Error) << testing::PrintToString(table);
  }
}

}  // namespace
}  // namespace gradferry
