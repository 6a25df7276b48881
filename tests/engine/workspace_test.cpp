// The memory of chunks in worlds of any size, on paper: no buffer is allocated.
#include "hooks/protocol/workspace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "hooks/protocol/defaults.h"
#include "hooks/protocol/plan.h"

namespace gradferry {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kCap = 96 * kMiB;
constexpr size_t kMostSlots = 4;
// As commits of the host's engine need in the largest world: 8 times 4096 records of 64 bytes.
constexpr uint64_t kOther = 2 * kMiB;

ParameterSpec parameter(const char* name, uint64_t num_elements, const char* codec,
                        ScalarType dtype = ScalarType::kFloat32) {
  return {.name = name,
          .num_elements = num_elements,
          .dtype = dtype,
          .codec = codec,
          .warmup = "exact",
          .worker_residual = false,
          .owner_residual = false};
}

// Matrices with three tiles per rank, and what lies between them.
Layout layout_of(uint32_t world_size) {
  const uint64_t tiles = uint64_t{3} * world_size + 1;
  return {{parameter("matrix", tiles * kTileElements, "q4"), parameter("bias", 5000, "exact"),
           parameter("wide", tiles * kTileElements / 2, "q8"), parameter("norm", 64, "exact")},
          0,
          Nodes::flat(world_size)};
}

WorkspaceLimits limits(uint64_t cap_bytes, uint64_t other_bytes, size_t most_slots = kMostSlots,
                       bool gathers_in_place = false) {
  return {.cap_bytes = cap_bytes,
          .other_bytes = other_bytes,
          .most_slots = most_slots,
          .gathers_in_place = gathers_in_place};
}

class World : public testing::TestWithParam<uint32_t> {};

TEST_P(World, KeepsWithinTheLimitAndChunksWithinTheBuffers) {
  const uint32_t world_size = GetParam();
  const Layout layout = layout_of(world_size);
  for (const uint32_t most : {kChunkBytes, kStreamChunkBytes}) {
    const uint32_t chunk_bytes = chunk_bytes_within(kCap, world_size, most);
    const Workspace workspace = plan_workspace(layout, chunk_bytes, limits(kCap, kOther));
    EXPECT_LE(workspace.bytes() + kOther, kCap);
    EXPECT_GE(workspace.slots, world_size <= 512 ? kMostSlots : 1);
    EXPECT_GE(workspace.receive_bytes, world_size * workspace.message_bytes);
    const BucketPlan plan = make_plan(layout, {0, 1, 2, 3},
                                      {.rank = 0,
                                       .chunk_bytes = chunk_bytes,
                                       .equal_scatter = true,
                                       .codecs = CodecChoice::kOwn,
                                       .residuals = false});
    for (const ChunkPlan& chunk : plan.chunks) {
      uint64_t sent = 0;
      for (const Shard& shard : chunk.shards) {
        sent += shard.scatter_bytes;
        EXPECT_GE(shard.scatter_bytes, kHeaderBytes + shard.worker_bytes);
        EXPECT_LE(shard.scatter_bytes, workspace.message_bytes);
      }
      EXPECT_LE(sent, workspace.send_bytes);
      EXPECT_LE(chunk.rails[0].gather_message_bytes, workspace.message_bytes);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Workspace, World,
                         testing::Values(2, 3, 8, 13, 14, 64, 512, 1024, 2048, 4096));

// The limit divided by the messages of four chunks of 128 KiB, 3 per rank and one more each.
TEST(Workspace, SmallWorldsHaveTheChunksThatSuitTheLink) {
  for (const uint32_t world_size : {1, 8, 32, 55}) {
    EXPECT_EQ(chunk_bytes_within(kCap, world_size, kChunkBytes), kChunkBytes);
  }
  EXPECT_LT(chunk_bytes_within(kCap, 56, kChunkBytes), kChunkBytes);
}

TEST(Workspace, ChunksShrinkWithTheWorldButHoldATile) {
  uint32_t before = kStreamChunkBytes;
  for (uint32_t world_size = 1; world_size <= 4096; ++world_size) {
    const uint32_t chunk_bytes = chunk_bytes_within(kCap, world_size, kStreamChunkBytes);
    EXPECT_LE(chunk_bytes, before);
    EXPECT_GE(chunk_bytes, kTileElements);
    before = chunk_bytes;
  }
}

// Ranks by node, node by node.
Nodes nodes_of(const std::vector<uint32_t>& sizes) {
  std::vector<std::vector<uint32_t>> members;
  uint32_t next = 0;
  for (const uint32_t size : sizes) {
    members.emplace_back(size);
    std::iota(members.back().begin(), members.back().end(), next);
    next += size;
  }
  return Nodes(members);
}

TEST(Workspace, NodesOfAnySizeHaveFourChunksWithinTheLimit) {
  const std::vector<std::vector<uint32_t>> shapes = {{2, 2},
                                                     {2, 1},
                                                     {4},
                                                     {8, 8},
                                                     {8, 8, 8, 3},
                                                     std::vector<uint32_t>(32, 8),
                                                     std::vector<uint32_t>(2, 16)};
  for (const auto& sizes : shapes) {
    const Nodes nodes = nodes_of(sizes);
    const uint32_t chunk_bytes = chunk_bytes_within(kCap, nodes.world_size(), kChunkBytes);
    const uint64_t dense_bytes = dense_bytes_within(kCap, chunk_bytes, nodes);
    for (const uint32_t rank : {0U, nodes.world_size() - 1, sizes[0] - 1}) {
      const Layout layout({parameter("matrix", uint64_t{1} << 24, "exact")}, rank, nodes);
      const Workspace workspace = plan_workspace(layout, chunk_bytes, limits(kCap, kOther));
      EXPECT_EQ(workspace.slots, kMostSlots) << sizes.size() << " nodes of " << sizes[0];
      EXPECT_LE(workspace.bytes() + kOther, kCap);
      const BucketPlan plan = make_plan(layout, {0},
                                        {.rank = rank,
                                         .chunk_bytes = chunk_bytes,
                                         .equal_scatter = false,
                                         .codecs = CodecChoice::kOwn,
                                         .residuals = false,
                                         .dense_bytes = dense_bytes});
      for (const ChunkPlan& chunk : plan.chunks) {
        uint64_t sent = 0;
        for (const Rail& rail : chunk.rails) {
          const uint64_t message = kHeaderBytes + rail.num_elements * sizeof(float);
          sent += message;
          EXPECT_LE(message * sizes[nodes.node_of(rank)], workspace.dense_send_bytes);
          EXPECT_LE(rail.gather_message_bytes, workspace.message_bytes);
        }
        EXPECT_LE(sent, workspace.dense_send_bytes);
        EXPECT_LE(chunk.forward_bytes * sizes[nodes.node_of(rank)], workspace.gathered_bytes);
      }
    }
  }
}

// Each plans for itself, and posts collectives in an order that depends on its slots.
TEST(Workspace, RanksOfUnevenNodesPlanTheSameSlots) {
  constexpr size_t kDeviceSlots = 5;
  for (const auto& sizes : std::vector<std::vector<uint32_t>>{{2, 1}, {1, 3}, {8, 8, 3}}) {
    const Nodes nodes = nodes_of(sizes);
    std::set<size_t> seen;
    for (const uint64_t cap : {kCap, 6 * kMiB, 3 * kMiB, 3 * kMiB / 2}) {
      const uint32_t chunk_bytes = chunk_bytes_within(cap, nodes.world_size(), kStreamChunkBytes);
      std::set<size_t> slots;
      for (uint32_t rank = 0; rank < nodes.world_size(); ++rank) {
        const Layout layout({parameter("matrix", uint64_t{1} << 22, "exact")}, rank, nodes);
        const Workspace workspace =
            plan_workspace(layout, chunk_bytes, limits(cap, 4096, kDeviceSlots));
        EXPECT_LE(workspace.bytes() + 4096, cap);
        slots.insert(workspace.slots);
      }
      EXPECT_EQ(slots.size(), 1) << sizes.size() << " nodes of " << sizes[0] << ", " << cap;
      seen.merge(slots);
    }
    EXPECT_GT(seen.size(), 1);
  }
}

// Each plans for itself, and extra ranks need less: the memory must be the same nevertheless.
TEST(Workspace, SiblingsPlanTheSameSharedMemory) {
  for (const auto& sizes : std::vector<std::vector<uint32_t>>{{2, 2}, {4}, {3, 1}, {8, 8, 3}}) {
    const Nodes nodes = nodes_of(sizes);
    const uint32_t num_siblings = sizes[0];
    for (const uint64_t cap : {kCap, 12 * kMiB}) {
      const uint32_t chunk_bytes = chunk_bytes_within(cap, nodes.world_size(), kChunkBytes);
      WorkspaceLimits shared = limits(cap, 0, kMostSlots, true);
      shared.siblings_share = true;
      std::vector<Workspace> planned;
      for (uint32_t rank = 0; rank < num_siblings; ++rank) {
        const Layout layout({parameter("matrix", uint64_t{1} << 22, "exact")}, rank, nodes);
        const Workspace& workspace =
            planned.emplace_back(plan_workspace(layout, chunk_bytes, shared));
        EXPECT_EQ(workspace.slots, planned[0].slots);
        EXPECT_EQ(workspace.shared_bytes, planned[0].shared_bytes);
        EXPECT_EQ(workspace.gathered_bytes, planned[0].gathered_bytes);
        EXPECT_EQ(workspace.dense_place_bytes, planned[0].dense_place_bytes);
        EXPECT_LE(workspace.bytes(), cap);
        const uint64_t places = uint64_t{nodes.num_rails()} * (num_siblings - 1);
        EXPECT_LE(workspace.gathered_bytes + places * workspace.dense_place_bytes,
                  workspace.shared_bytes);
        const BucketPlan plan =
            make_plan(layout, {0},
                      {.rank = rank,
                       .chunk_bytes = chunk_bytes,
                       .equal_scatter = false,
                       .codecs = CodecChoice::kOwn,
                       .residuals = false,
                       .dense_bytes = dense_bytes_within(cap, chunk_bytes, nodes)});
        for (const ChunkPlan& chunk : plan.chunks) {
          EXPECT_LE(uint64_t{chunk.forward_bytes} * num_siblings, workspace.gathered_bytes);
          for (const Rail& rail : chunk.rails) {
            EXPECT_LE(rail.num_elements * sizeof(float), workspace.dense_place_bytes);
          }
        }
      }
    }
  }
}

TEST(Workspace, GradientsBetweenRanksOfANodeKeepARoundSizeWhereThereIsMemory) {
  EXPECT_EQ(dense_bytes_within(kCap, kChunkBytes, nodes_of({2, 2})), kMostDenseBytes);
  EXPECT_LT(dense_bytes_within(kCap, kChunkBytes, nodes_of({8, 8})), kMostDenseBytes);
  EXPECT_EQ(dense_bytes_within(kMiB, kChunkBytes, nodes_of({8, 8})),
            kTileElements * sizeof(double));
}

// Four slots, then three, two, one, and one whose buffers take turns.
TEST(Workspace, LessMemoryMeansFewerChunksInFlight) {
  const Layout layout = layout_of(8);
  const uint32_t chunk_bytes = 32768;
  const uint64_t slot = plan_workspace(layout, chunk_bytes, limits(kCap, 0, 1)).bytes();
  for (size_t slots = kMostSlots; slots >= 1; --slots) {
    const Workspace workspace =
        plan_workspace(layout, chunk_bytes, limits(slots * slot + 100, 100));
    EXPECT_EQ(workspace.slots, slots);
    EXPECT_FALSE(workspace.shared_receive);
  }
  const Workspace least = plan_workspace(layout, chunk_bytes, limits(slot - 1, 0));
  EXPECT_EQ(least.slots, 1);
  EXPECT_TRUE(least.shared_receive);
  EXPECT_EQ(least.bytes(), slot - least.receive_bytes);
}

// Only then is room for the message itself needed: a reduce reads what it would overwrite.
TEST(Workspace, AGatherInPlaceNeedsItsOwnMemoryOnlyWhereBuffersTakeTurns) {
  const Layout layout = layout_of(8);
  const Workspace usual = plan_workspace(layout, 32768, limits(kCap, 0, 1, true));
  EXPECT_EQ(usual.own_message_bytes, 0);
  EXPECT_EQ(usual.bytes(), usual.send_bytes + 2 * usual.receive_bytes);
  const Workspace least = plan_workspace(layout, 32768, limits(usual.bytes() - 1, 0, 1, true));
  EXPECT_EQ(least.own_message_bytes, least.message_bytes);
  EXPECT_EQ(least.bytes(), least.send_bytes + least.receive_bytes + least.message_bytes);
}

// An owner receives 4096 payloads of 32 KiB for every tile of float64.
TEST(Workspace, WhatCannotFitIsRefusedWithTheLeastThatDoes) {
  const Layout layout({parameter("weight", 1 << 20, "exact", ScalarType::kFloat64)}, 0,
                      Nodes::flat(4096));
  const uint32_t chunk_bytes = chunk_bytes_within(kCap, 4096, kStreamChunkBytes);
  try {
    (void)plan_workspace(layout, chunk_bytes, limits(kCap, 0));
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    const std::string text = error.what();
    EXPECT_NE(text.find("more than the " + std::to_string(kCap)), std::string::npos) << text;
    const size_t at = text.rfind("workspace_cap_mb=") + sizeof("workspace_cap_mb=") - 1;
    const uint64_t needed = std::stoull(text.substr(at));
    EXPECT_NO_THROW((void)plan_workspace(layout, chunk_bytes, limits(needed * kMiB, 0)));
    EXPECT_ANY_THROW((void)plan_workspace(layout, chunk_bytes, limits((needed - 1) * kMiB, 0)));
  }
}

}  // namespace
}  // namespace gradferry
