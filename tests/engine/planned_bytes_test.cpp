// What ranks send in worlds of any size, on paper: what the codec's bits say, and little more,
// within the memory that is allowed without options. Prints the table.
#include "hooks/protocol/planned_bytes.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "gradferry/wire.h"
#include "hooks/protocol/defaults.h"
#include "hooks/protocol/workspace.h"

namespace gradferry {
namespace {

constexpr uint64_t kBucketElements = (uint64_t{kBucketCapMiB} << 20) / sizeof(float);
constexpr uint32_t kBuckets = 2;
// Beside messages, of commits in the largest world.
constexpr uint64_t kOther = uint64_t{2} << 20;

Nodes nodes_of(uint32_t world_size, uint32_t ranks) {
  std::vector<std::vector<uint32_t>> members;
  for (uint32_t first = 0; first < world_size; first += ranks) {
    members.emplace_back(ranks);
    std::iota(members.back().begin(), members.back().end(), first);
  }
  return Nodes(std::move(members));
}

void expect_little_more_than_payloads(const Nodes& nodes, const char* codec, bool on_streams) {
  const uint32_t world_size = nodes.world_size(), siblings = nodes.most_siblings();
  std::vector<ParameterSpec> parameters;
  std::vector<std::vector<uint32_t>> buckets;
  for (uint32_t i = 0; i < kBuckets; ++i) {
    parameters.push_back({.name = "weight",
                          .num_elements = kBucketElements,
                          .dtype = ScalarType::kFloat32,
                          .codec = codec,
                          .warmup = "exact",
                          .worker_residual = false,
                          .owner_residual = false});
    buckets.push_back({i});
  }
  const Layout layout(parameters, 0, nodes);
  const uint64_t cap = uint64_t{on_streams ? kStreamWorkspaceCapMiB : kWorkspaceCapMiB} << 20;
  const uint32_t chunk_bytes =
      chunk_bytes_within(cap, world_size, on_streams ? kStreamChunkBytes : kChunkBytes);
  const PlanOptions options{.rank = 0,
                            .chunk_bytes = chunk_bytes,
                            .equal_scatter = on_streams,
                            .codecs = CodecChoice::kOwn,
                            .residuals = false,
                            .dense_bytes = dense_bytes_within(cap, chunk_bytes, nodes, on_streams),
                            .rail_bytes = rail_bytes_within(cap, nodes)};
  const Workspace workspace = plan_workspace(
      layout, options,
      {.cap_bytes = cap, .other_bytes = kOther, .most_slots = 1, .gathers_in_place = !on_streams});
  EXPECT_LE(workspace.bytes() + kOther, cap);

  double payloads = 0;  // of all tiles, in both stages
  for (const Parameter& parameter : layout.parameters()) {
    for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
      for (const Stage stage : {Stage::kWorker, Stage::kOwner}) {
        payloads += layout.payload_bytes(parameter, layout.tile_elements(parameter, t), stage,
                                         options.codecs);
      }
    }
  }
  std::vector<uint32_t> hosts;
  for (uint32_t rank = 0; rank < world_size; ++rank) hosts.push_back(nodes.node_of(rank));
  double sent = 0, headers = 0, on_host = 0;
  uint64_t messages = 0;
  uint32_t shortest = ~0U;
  for (const StepBytes& rank : planned_bytes(layout, options, false, buckets, hosts)) {
    headers +=
        kHeaderBytes * static_cast<double>(rank.num_messages + kBuckets * (world_size - siblings));
    sent += static_cast<double>(rank.to_other_hosts);
    on_host += static_cast<double>(rank.on_host);
    messages = std::max(messages, rank.num_messages);
    shortest = std::min(shortest, rank.shortest_message);
  }
  const double num_nodes = nodes.num_nodes();
  const double formula = payloads * (num_nodes - 1);  // of all ranks
  std::printf(
      "%5u %2u %-10s %-7s %8.2f MB of a rank, %.4f without headers; %6llu messages from %u B\n",
      world_size, siblings, codec, on_streams ? "streams" : "host", sent / world_size / 1e6,
      (sent - headers) / formula, static_cast<unsigned long long>(messages), shortest);
  EXPECT_GE(sent - headers, formula);
  EXPECT_LE(sent - headers, 1.05 * formula);
  if (siblings == 1) return;
  const double dense = kBuckets * kBucketElements * sizeof(float);
  // Gradients to their leaders, and to all what leaders have gathered.
  EXPECT_LE(on_host, 1.05 * num_nodes * (siblings - 1) * (dense + payloads / 2));
}

TEST(PlannedBytes, AreThoseOfPayloadsInWorldsOfAnySize) {
  for (const uint32_t siblings : {1, 8}) {
    for (const uint32_t world_size : {2, 8, 64, 256, 512, 1024, 4096}) {
      if (world_size <= siblings) continue;
      const Nodes nodes = nodes_of(world_size, siblings);
      for (const char* codec : {"exact", "q8", "q4", "rht:bits=2", "sign1", "topk"}) {
        expect_little_more_than_payloads(nodes, codec, /*on_streams=*/true);
      }
      expect_little_more_than_payloads(nodes, "exact", /*on_streams=*/false);
    }
  }
}

}  // namespace
}  // namespace gradferry
