// The memory of chunks in worlds of any size, on paper: no buffer is allocated. That chunks fit,
// and that ranks plan alike, is in tests/fuzz/plan_fuzz.cpp.
#include "hooks/protocol/workspace.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <utility>
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

// How buckets are cut within a limit: on streams into chunks of kStreamChunkBytes.
PlanOptions cut(uint64_t cap_bytes, const Nodes& nodes, bool on_streams,
                uint32_t most = kStreamChunkBytes) {
  const uint32_t chunk_bytes = chunk_bytes_within(cap_bytes, nodes.world_size(), most);
  return {.rank = 0,
          .chunk_bytes = chunk_bytes,
          .equal_scatter = on_streams,
          .codecs = CodecChoice::kOwn,
          .residuals = false,
          .dense_bytes = dense_bytes_within(cap_bytes, chunk_bytes, nodes, on_streams),
          .rail_bytes = rail_bytes_within(cap_bytes, nodes)};
}

WorkspaceLimits limits(uint64_t cap_bytes, uint64_t other_bytes) {
  return {.cap_bytes = cap_bytes,
          .other_bytes = other_bytes,
          .most_slots = kMostSlots,
          .gathers_in_place = false};
}

// The limit divided by the messages of four chunks of 128 KiB, 3 per rank and one more each.
TEST(Workspace, SmallWorldsHaveTheChunksThatSuitTheLink) {
  for (const uint32_t world_size : {1, 8, 32, 55}) {
    EXPECT_EQ(chunk_bytes_within(kCap, world_size, kChunkBytes), kChunkBytes);
  }
  EXPECT_LT(chunk_bytes_within(kCap, 56, kChunkBytes), kChunkBytes);
}

TEST(Workspace, ChunksShrinkWithTheWorld) {
  uint32_t before = kStreamChunkBytes;
  for (uint32_t world_size = 1; world_size <= 4096; ++world_size) {
    const uint32_t chunk_bytes = chunk_bytes_within(kCap, world_size, kStreamChunkBytes);
    EXPECT_LE(chunk_bytes, before);
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

// Up to 512 ranks have four chunks, those of the largest worlds one at least.
TEST(Workspace, NodesOfAnySizeKeepWithinTheLimit) {
  std::vector<std::vector<uint32_t>> shapes = {
      {2, 2}, {2, 1}, {4}, {8, 8}, {8, 8, 8, 3}, std::vector<uint32_t>(32, 8), {16, 16}};
  for (const uint32_t flat : {2, 3, 8, 13, 14, 64, 512, 1024, 2048, 4096}) {
    shapes.emplace_back(flat, 1);
  }
  for (const auto& sizes : shapes) {
    const Nodes nodes = nodes_of(sizes);
    const uint64_t tiles = uint64_t{3} * nodes.world_size() + 1;
    const std::vector<ParameterSpec> parameters = {
        parameter("matrix", tiles * kTileElements, "q4"), parameter("bias", 5000, "exact"),
        parameter("wide", tiles * kTileElements / 2, "q8"), parameter("norm", 64, "exact")};
    for (const bool on_streams : {false, true}) {
      const PlanOptions plan =
          cut(kCap, nodes, on_streams, on_streams ? kStreamChunkBytes : kChunkBytes);
      for (const uint32_t rank : {0U, nodes.world_size() - 1, sizes[0] - 1}) {
        SCOPED_TRACE(std::to_string(sizes.size()) + " nodes of " + std::to_string(sizes[0]));
        const Layout layout(parameters, rank, nodes);
        const Workspace workspace = plan_workspace(layout, plan, limits(kCap, kOther));
        EXPECT_LE(workspace.bytes() + kOther, kCap);
        const size_t fewest = on_streams && !nodes.is_flat() ? 2 : kMostSlots;
        EXPECT_GE(workspace.slots, nodes.world_size() <= 512 ? fewest : 1);
      }
    }
  }
}

TEST(Workspace, GradientsBetweenRanksOfANodeKeepARoundSizeWhereThereIsMemory) {
  EXPECT_EQ(dense_bytes_within(kCap, kChunkBytes, nodes_of({2, 2}), false), kMostDenseBytes);
  EXPECT_LT(dense_bytes_within(kCap, kChunkBytes, nodes_of({8, 8}), false), kMostDenseBytes);
  EXPECT_EQ(dense_bytes_within(kMiB, kChunkBytes, nodes_of({8, 8}), false),
            kTileElements * sizeof(double));
}

// DDP's bucket, and the matrix of 64 MiB that alone makes one, of the codec that most use.
TEST(Workspace, OnStreamsABucketIsOneChunkAndTwoAreInFlight) {
  constexpr uint64_t kStreamCap = kStreamWorkspaceCapMiB * kMiB;
  for (const auto& [num_nodes, ranks] : std::vector<std::pair<uint32_t, uint32_t>>{
           {2, 1}, {16, 1}, {64, 1}, {512, 1}, {2, 4}, {2, 8}, {8, 8}, {64, 8}}) {
    const Nodes nodes = nodes_of(std::vector<uint32_t>(num_nodes, ranks));
    const PlanOptions options = cut(kStreamCap, nodes, /*on_streams=*/true);
    for (const auto& [codec, mebibytes] : std::vector<std::pair<const char*, uint64_t>>{
             {"q4", 25}, {"q8", 25}, {"bf16", 25}, {"exact", 25}, {"q4", 64}}) {
      SCOPED_TRACE(std::to_string(num_nodes) + " nodes of " + std::to_string(ranks) + ", " + codec);
      const Layout layout(
          {parameter("first", mebibytes * kMiB / 4, codec), parameter("bias", 5000, "exact"),
           parameter("second", 4 * mebibytes * kMiB, codec)},
          0, nodes);
      EXPECT_EQ(make_plan(layout, {0, 1}, options).chunks.size(), 1);
      EXPECT_GE(plan_workspace(layout, options, limits(kStreamCap, kOther)).slots, 2);
    }
  }
}

// An owner receives 4096 payloads of 32 KiB for every tile of float64.
TEST(Workspace, WhatCannotFitIsRefusedWithTheLeastThatDoes) {
  const Layout layout({parameter("weight", 1 << 20, "exact", ScalarType::kFloat64)}, 0,
                      Nodes::flat(4096));
  const auto attach = [&](uint64_t cap_bytes) {
    (void)plan_workspace(layout, cut(cap_bytes, Nodes::flat(4096), /*on_streams=*/true),
                         limits(cap_bytes, 0));
  };
  try {
    attach(kCap);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    const std::string text = error.what();
    EXPECT_NE(text.find("more than the " + std::to_string(kCap)), std::string::npos) << text;
    const size_t at = text.rfind("workspace_cap_mb=") + sizeof("workspace_cap_mb=") - 1;
    const uint64_t needed = std::stoull(text.substr(at));
    EXPECT_NO_THROW(attach(needed * kMiB));
    EXPECT_ANY_THROW(attach((needed - 1) * kMiB));
  }
}

// Nothing is gathered. Down to one slot, and no further: nothing is left that could share memory.
TEST(Workspace, AReduceScatterHasNoRoomForWhatIsNotGathered) {
  ParameterSpec shard = parameter("weight", 8 * kTileElements, "q4");
  shard.owner = 0;
  const Layout layout({shard}, 0, Nodes::flat(3));
  PlanOptions plan = cut(kCap, Nodes::flat(3), /*on_streams=*/false, 32768);
  plan.collective = Collective::kReduceScatter;
  const Workspace workspace = plan_workspace(layout, plan, limits(kCap, 0));
  EXPECT_EQ(workspace.slots, kMostSlots);
  EXPECT_EQ(workspace.slot_bytes(), workspace.send_bytes + workspace.receive_bytes);
  const uint64_t least = workspace.slot_bytes();
  EXPECT_EQ(plan_workspace(layout, plan, limits(least, 0)).slots, 1);
  EXPECT_THROW((void)plan_workspace(layout, plan, limits(least - 1, 0)), Error);
}

}  // namespace
}  // namespace gradferry
