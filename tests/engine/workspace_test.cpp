// The memory of chunks in worlds of any size, on paper: no buffer is allocated. That chunks fit,
// and that ranks plan alike, is in tests/fuzz/plan_fuzz.cpp.
#include "hooks/protocol/workspace.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "gradferry/error.h"
#include "hooks/protocol/defaults.h"

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

TEST_P(World, KeepsWithinTheLimit) {
  const uint32_t world_size = GetParam();
  const Layout layout = layout_of(world_size);
  for (const uint32_t most : {kChunkBytes, kStreamChunkBytes}) {
    const uint32_t chunk_bytes = chunk_bytes_within(kCap, world_size, most);
    const Workspace workspace = plan_workspace(layout, chunk_bytes, limits(kCap, kOther));
    EXPECT_LE(workspace.bytes() + kOther, kCap);
    EXPECT_GE(workspace.slots, world_size <= 512 ? kMostSlots : 1);
    EXPECT_GE(workspace.receive_bytes, world_size * workspace.message_bytes);
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
    for (const uint32_t rank : {0U, nodes.world_size() - 1, sizes[0] - 1}) {
      const Layout layout({parameter("matrix", uint64_t{1} << 24, "exact")}, rank, nodes);
      const Workspace workspace = plan_workspace(layout, chunk_bytes, limits(kCap, kOther));
      EXPECT_EQ(workspace.slots, kMostSlots) << sizes.size() << " nodes of " << sizes[0];
      EXPECT_LE(workspace.bytes() + kOther, kCap);
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
