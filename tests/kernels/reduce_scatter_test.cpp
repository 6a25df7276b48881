// Layout, plan and workspace of a reduce-scatter: tables alone, no gradient is allocated. That
// tiles are sent once and reduced where they lie is what tests/fuzz/plan_fuzz.cpp asks of any plan.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "hooks/protocol/plan.h"
#include "hooks/protocol/workspace.h"

namespace gradferry {
namespace {

constexpr uint32_t kWorldSize = 3;
constexpr uint32_t kOwnRank = 1;
constexpr uint32_t kTileBytes = kTileElements * sizeof(float);
constexpr uint32_t kBiasElements = 21;

ParameterSpec shard(const char* name, uint32_t owner, uint64_t num_elements, const char* codec) {
  return {.name = name,
          .num_elements = num_elements,
          .dtype = ScalarType::kFloat32,
          .codec = codec,
          .warmup = "exact",
          .worker_residual = true,
          .owner_residual = false,
          .owner = owner};
}

// A module [rank][parameter]: of every rank so many tiles, and a bias.
Layout module_layout(const std::vector<uint32_t>& tiles_of, const char* codec = "exact") {
  std::vector<ParameterSpec> shards;
  for (uint32_t rank = 0; rank < tiles_of.size(); ++rank) {
    shards.push_back(shard("weight", rank, uint64_t{tiles_of[rank]} * kTileElements, codec));
    shards.push_back(shard("bias", rank, kBiasElements, "exact"));
  }
  const auto world_size = static_cast<uint32_t>(tiles_of.size());
  return {shards, kOwnRank, Nodes::flat(world_size)};
}

BucketPlan plan_of(const Layout& layout, uint32_t chunk_bytes, bool equal_scatter = false) {
  std::vector<uint32_t> all(layout.parameters().size());
  for (uint32_t i = 0; i < all.size(); ++i) all[i] = i;
  return make_plan(layout, all,
                   {.rank = layout.rank(),
                    .chunk_bytes = chunk_bytes,
                    .equal_scatter = equal_scatter,
                    .codecs = CodecChoice::kOwn,
                    .residuals = true,
                    .collective = Collective::kReduceScatter});
}

std::vector<uint32_t> worker_bytes(const ChunkPlan& chunk) {
  std::vector<uint32_t> sizes;
  for (const Shard& each : chunk.shards) sizes.push_back(each.worker_bytes);
  return sizes;
}

TEST(ReduceScatter, OwnersAreThoseOfTheParametersWhateverTheirLoad) {
  const Layout layout({shard("a", 2, 3 * kTileElements, "q4"), shard("b", 2, 1, "exact"),
                       shard("c", 0, kTileElements, "q4")},
                      kOwnRank, Nodes::flat(kWorldSize));
  std::vector<uint32_t> owners;
  for (uint64_t tile = 0; tile < layout.num_tiles(); ++tile) owners.push_back(layout.owner(tile));
  EXPECT_EQ(owners, (std::vector<uint32_t>{2, 2, 2, 2, 0}));
  // What a rank withholds of all shards, it keeps itself.
  EXPECT_EQ(layout.worker_residual_elements(), 4 * kTileElements + kResidualAlignment);
  EXPECT_EQ(layout.owner_residual_elements(), 0);
}

TEST(ReduceScatter, AnOwnerThatOwnsNothingIsRefused) {
  const Nodes uneven({{0, 2}, {1}});  // rank 2 is beyond the rails
  for (const Nodes& nodes : {Nodes::flat(2), uneven}) {
    try {
      const Layout layout({shard("weight", 2, 5, "q4")}, 0, nodes);
      FAIL() << "it was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_NE(std::string(error.what()).find("'weight' has owner 2, which is none of"),
                std::string::npos)
          << error.what();
    }
  }
}

// Two tiles of every rank per chunk, although the bucket has all of a rank first.
TEST(ReduceScatter, EveryChunkHasTilesForEveryRank) {
  const BucketPlan plan = plan_of(module_layout({5, 5, 5}), 2 * kTileBytes);
  ASSERT_EQ(plan.chunks.size(), 3);
  const auto equal = [](uint32_t bytes) { return std::vector<uint32_t>(kWorldSize, bytes); };
  EXPECT_EQ(worker_bytes(plan.chunks[0]), equal(2 * kTileBytes));
  EXPECT_EQ(worker_bytes(plan.chunks[1]), equal(2 * kTileBytes));
  EXPECT_EQ(worker_bytes(plan.chunks[2]), equal(kTileBytes + 96));  // and 21 numbers, padded
}

// What is left of the longest shard travels alone.
TEST(ReduceScatter, ShardsOfAnyLengthAreDealtInTurns) {
  const BucketPlan plan = plan_of(module_layout({0, 1, 4}), 2 * kTileBytes);
  ASSERT_EQ(plan.chunks.size(), 3);
  EXPECT_EQ(worker_bytes(plan.chunks[0]),
            (std::vector<uint32_t>{96, kTileBytes + 96, 2 * kTileBytes}));
  EXPECT_EQ(worker_bytes(plan.chunks[1]), (std::vector<uint32_t>{0, 0, 2 * kTileBytes}));
  EXPECT_EQ(worker_bytes(plan.chunks[2]), (std::vector<uint32_t>{0, 0, 96}));
}

// Equal shards need no padding, with which any others are padded where that costs little.
TEST(ReduceScatter, MessagesOfEqualShardsAreEqual) {
  for (const bool equal_scatter : {false, true}) {
    const BucketPlan plan = plan_of(module_layout({4, 4, 4}, "q4"), 1 << 20, equal_scatter);
    ASSERT_EQ(plan.chunks.size(), 1);
    for (const Shard& each : plan.chunks[0].shards) {
      EXPECT_EQ(each.scatter_bytes, kHeaderBytes + each.worker_bytes);
      EXPECT_EQ(each.worker_bytes, plan.chunks[0].shards[0].worker_bytes);
    }
  }
}

TEST(ReduceScatter, WorkspaceHasNoRoomForWhatIsNotGathered) {
  const Layout layout = module_layout({8, 8, 8}, "q4");
  const WorkspaceLimits limits{.cap_bytes = 96 << 20,
                               .other_bytes = 0,
                               .most_slots = 4,
                               .gathers_in_place = true,
                               .collective = Collective::kReduceScatter};
  const Workspace workspace = plan_workspace(layout, 32768, limits);
  EXPECT_EQ(workspace.slots, 4);
  EXPECT_EQ(workspace.gathered_bytes + workspace.own_message_bytes, 0);
  EXPECT_EQ(workspace.slot_bytes(), workspace.send_bytes + workspace.receive_bytes);
  // Down to one slot, and no further: nothing is left that could share memory.
  WorkspaceLimits least = limits;
  least.cap_bytes = workspace.slot_bytes();
  EXPECT_EQ(plan_workspace(layout, 32768, least).slots, 1);
  --least.cap_bytes;
  EXPECT_THROW((void)plan_workspace(layout, 32768, least), Error);
}

}  // namespace
}  // namespace gradferry
