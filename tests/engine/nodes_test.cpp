// Which ranks share a node, and the plan of a bucket between nodes.
#include "hooks/protocol/nodes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "hooks/protocol/plan.h"
#include "hooks/protocol/workspace.h"

namespace gradferry {
namespace {

using Table = std::vector<std::vector<uint32_t>>;

TEST(Nodes, RailsAreTheRanksOfEqualLocalIndexThatEveryNodeHas) {
  const Nodes nodes(Table{{0, 3, 4}, {1, 2}});
  EXPECT_EQ(nodes.world_size(), 5);
  EXPECT_EQ(nodes.num_nodes(), 2);
  EXPECT_EQ(nodes.num_rails(), 2);
  EXPECT_EQ(nodes.peers(0), (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(nodes.peers(1), (std::vector<uint32_t>{3, 2}));
  EXPECT_EQ(nodes.siblings(4), (std::vector<uint32_t>{0, 3, 4}));
  EXPECT_EQ(nodes.local_index(2), 1);
  EXPECT_TRUE(nodes.is_leader(3));
  EXPECT_FALSE(nodes.is_leader(4));
  EXPECT_FALSE(nodes.is_flat());
  EXPECT_TRUE(Nodes::flat(3).is_flat());
}

TEST(Nodes, TablesThatAreNoneAreRefused) {
  const std::vector<Table> wrong{{},         {{}},     {{0}, {}},     {{0, 0}},     {{0, 2}},
                                 {{1}, {0}}, {{1, 0}}, {{0}, {0, 1}}, {{0, 1}, {3}}};
  for (const Table& table : wrong) {
    EXPECT_THROW(Nodes nodes(table), Error) << testing::PrintToString(table);
  }
}

constexpr uint64_t kElements = 3 * kTileElements + 17;
constexpr uint32_t kChunkBytes = 8192;

Layout layout_on(const Nodes& nodes, uint32_t rank) {
  std::vector<ParameterSpec> parameters;
  for (const char* name : {"first", "second", "third", "fourth", "fifth"}) {
    parameters.push_back({.name = name,
                          .num_elements = kElements,
                          .dtype = ScalarType::kBFloat16,
                          .codec = parameters.size() % 2 == 0 ? "q4" : "exact",
                          .warmup = "exact",
                          .worker_residual = parameters.size() % 2 == 0,
                          .owner_residual = true});
  }
  return {parameters, rank, nodes};
}

BucketPlan plan_on(const Layout& layout) {
  return make_plan(layout, {4, 3, 2, 1, 0},
                   {.rank = layout.rank(),
                    .chunk_bytes = kChunkBytes,
                    .equal_scatter = false,
                    .codecs = CodecChoice::kOwn,
                    .residuals = true});
}

size_t num_tiles(const std::vector<PlannedBatch>& batches) {
  size_t sum = 0;
  for (const PlannedBatch& batch : batches) sum += batch.tiles.size();
  return sum;
}

class Between : public testing::TestWithParam<Table> {
 protected:
  const Nodes nodes_{GetParam()};
};

// Every tile has one leader per node, which keeps its worker residual, and one owner.
TEST_P(Between, ResidualsOfANodeAreShardedOverItsLeaders) {
  std::vector<uint64_t> by_node(nodes_.num_nodes());
  uint64_t owned = 0;
  for (uint32_t rank = 0; rank < nodes_.world_size(); ++rank) {
    const Layout layout = layout_on(nodes_, rank);
    for (uint64_t tile = 0; tile < layout.num_tiles(); ++tile) {
      const bool has = layout.worker_residual_offset(tile) != kNoResidual;
      const bool wants = layout.parameter_of(tile).worker_residual;
      ASSERT_EQ(has, wants && nodes_.local_index(rank) == layout.rail(tile));
      by_node[nodes_.node_of(rank)] += has;
      owned += layout.owner_residual_offset(tile) != kNoResidual;
    }
  }
  for (const uint64_t tiles : by_node) EXPECT_EQ(tiles, 3 * 4);
  EXPECT_EQ(owned, 5 * 4);
}

TEST_P(Between, PlansOfAllRanksFitEachOther) {
  std::vector<BucketPlan> plans;
  for (uint32_t rank = 0; rank < nodes_.world_size(); ++rank) {
    plans.push_back(plan_on(layout_on(nodes_, rank)));
    ASSERT_EQ(plans[rank].chunks.size(), plans[0].chunks.size());
  }
  EXPECT_GT(plans[0].chunks.size(), 1);
  for (size_t c = 0; c < plans[0].chunks.size(); ++c) {
    size_t pieces = 0;
    for (const Rail& rail : plans[0].chunks[c].rails) pieces += rail.pieces.size();
    for (uint32_t rank = 0; rank < nodes_.world_size(); ++rank) {
      const ChunkPlan& chunk = plans[rank].chunks[c];
      const uint32_t rail = nodes_.local_index(rank);
      ASSERT_EQ(chunk.rails.size(), nodes_.num_rails());
      EXPECT_EQ(num_tiles(chunk.decode), pieces);
      EXPECT_EQ(chunk.forward_bytes, plans[0].chunks[c].forward_bytes);
      if (!nodes_.is_leader(rank)) {
        EXPECT_EQ(num_tiles(chunk.encode) + num_tiles(chunk.reduce), 0);
        continue;
      }
      EXPECT_EQ(num_tiles(chunk.encode), chunk.rails[rail].pieces.size());
      // What a rank sends its peer is what that expects.
      for (const uint32_t peer : nodes_.peers(rail)) {
        const uint32_t to = nodes_.node_of(peer), from = nodes_.node_of(rank);
        EXPECT_EQ(chunk.shards[to].owner_bytes, chunk.rails[rail].owner_bytes[to]);
        EXPECT_EQ(plans[peer].chunks[c].shards[to].worker_bytes, chunk.shards[to].worker_bytes)
            << from << " to " << to;
      }
    }
  }
}

TEST_P(Between, PiecesLieOneAfterTheOtherAndFitTheBuffers) {
  for (uint32_t rank = 0; rank < nodes_.world_size(); ++rank) {
    const Layout layout = layout_on(nodes_, rank);
    const BucketPlan plan = plan_on(layout);
    const Workspace workspace = plan_workspace(layout, kChunkBytes,
                                               {.cap_bytes = uint64_t{1} << 30,
                                                .other_bytes = 0,
                                                .most_slots = 1,
                                                .gathers_in_place = false});
    std::vector<uint8_t> covered(plan.num_elements);
    for (const ChunkPlan& chunk : plan.chunks) {
      uint64_t dense_bytes = 0;
      for (const Rail& rail : chunk.rails) {
        uint32_t next = 0;
        for (const Piece& piece : rail.pieces) {
          ASSERT_EQ(piece.offset, next);
          next += (piece.num_elements + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
          for (uint32_t i = 0; i < piece.num_elements; ++i) {
            ++covered[piece.gradient_offset + i];
          }
        }
        ASSERT_EQ(rail.num_elements, next);
        dense_bytes += kHeaderBytes + uint64_t{next} * item_bytes(chunk.dtype);
      }
      ASSERT_LE(dense_bytes, workspace.dense_send_bytes);
      ASSERT_LE(uint64_t{chunk.forward_bytes} * layout.nodes().siblings(rank).size(),
                workspace.gathered_bytes);
    }
    EXPECT_TRUE(std::ranges::all_of(covered, [](uint8_t times) { return times == 1; }));
  }
}

INSTANTIATE_TEST_SUITE_P(Nodes, Between,
                         testing::Values(Table{{0, 1}, {2, 3}}, Table{{0, 3}, {1, 2}},
                                         Table{{0, 1}, {2}}, Table{{0}, {1, 2, 3}},
                                         Table{{0, 1}, {2, 3}, {4, 5}}, Table{{0, 1, 2, 3}}));

}  // namespace
}  // namespace gradferry
