// The memory of any bucket of any model in any world: chunks fit the buffers, and ranks plan alike.
// That each element and each residual has one place, and that what one rank sends is what the other
// expects, shows where averages and residuals are right: in simulated worlds (tests/faults/sim)
// and, of an all-gather, in tests/fsdp.
#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "hooks/protocol/plan.h"
#include "hooks/protocol/workspace.h"
#include "tests/fuzz/codec_calls.h"

namespace gradferry::fuzzing {
namespace {

struct World {
  std::vector<ParameterSpec> parameters;
  std::vector<uint32_t> bucket;
  std::vector<std::vector<uint32_t>> members;  // of nodes
  PlanOptions options{};
  WorkspaceLimits limits{};
};

// One rank's view.
struct Rank {
  Layout layout;
  BucketPlan plan;
};

World take_world(Bytes& input) {
  World world;
  const uint32_t num_nodes = 1 + input.below(4);
  const bool flat = input.flip();
  uint32_t world_size = 0;
  for (uint32_t node = 0; node < num_nodes; ++node) {
    auto& ranks = world.members.emplace_back(flat ? 1 : 1 + input.below(4));
    std::iota(ranks.begin(), ranks.end(), world_size);
    world_size += static_cast<uint32_t>(ranks.size());
  }
  Collective collective = Collective::kAllReduce;
  if (flat && input.flip()) {
    collective = input.flip() ? Collective::kReduceScatter : Collective::kAllGather;
  }
  const ScalarType dtype = static_cast<ScalarType>(input.below(4));
  for (uint32_t count = 1 + input.below(6); count > 0; --count) {
    const auto codec = [&] {
      // Those whose payload is the same in both stages.
      constexpr std::array kGathered = {"exact", "bf16", "q8", "q4"};
      const std::string text = scatters(collective)
                                   ? take_codec(input)
                                   : std::string(kGathered[input.below(kGathered.size())]);
      const bool fits = parse_codec(text).codec->supports_float64;
      return dtype == ScalarType::kFloat64 && !fits ? std::string("exact") : text;
    };
    ParameterSpec& spec = world.parameters.emplace_back();
    spec.name.assign(1, 'p');  // g++ 12 takes = "p" for a copy that overlaps
    spec.num_elements = input.flip() ? input.take<uint16_t>() : input.take<uint8_t>();
    spec.dtype = dtype;
    spec.codec = codec();
    spec.warmup = codec();
    spec.worker_residual = input.flip();
    spec.owner_residual = input.flip();
    if (collective != Collective::kAllReduce) spec.owner = input.below(world_size);
  }
  std::vector<uint32_t> order(world.parameters.size());
  std::iota(order.begin(), order.end(), 0U);
  for (uint32_t i = 0; i < order.size(); ++i) std::swap(order[i], order[input.below(order.size())]);
  order.resize(1 + input.below(order.size()));
  world.bucket = std::move(order);
  const uint64_t cap = uint64_t{input.take<uint16_t>()} * 1024;
  const Nodes nodes(world.members);
  const uint32_t most = 1 + input.take<uint32_t>() % (1U << 20);
  world.options = {.rank = 0,
                   .chunk_bytes = chunk_bytes_within(cap, world_size, most),
                   .equal_scatter = input.flip(),
                   .codecs = static_cast<CodecChoice>(input.below(3)),
                   .residuals = input.flip(),
                   .collective = collective};
  world.options.dense_bytes = dense_bytes_within(cap, world.options.chunk_bytes, nodes);
  world.limits = {.cap_bytes = cap,
                  .other_bytes = input.take<uint16_t>(),
                  .most_slots = 1 + input.below(8),
                  .gathers_in_place = input.flip(),
                  .siblings_share = input.flip() && !nodes.is_flat(),
                  .collective = collective};
  return world;
}

void check_fits(const World& world, const Rank& rank, const Workspace& space) {
  const Nodes& nodes = rank.layout.nodes();
  EXPECT_LE(space.bytes() + world.limits.other_bytes, world.limits.cap_bytes);
  EXPECT_TRUE(space.slots >= 1 && space.slots <= world.limits.most_slots);
  const bool leader = nodes.is_leader(rank.layout.rank());
  for (const ChunkPlan& chunk : rank.plan.chunks) {
    uint64_t sent = 0, dense = 0;
    for (const Shard& shard : chunk.shards) {
      sent += shard.scatter_bytes;
      ASSERT_LE(shard.scatter_bytes, space.message_bytes);
    }
    if (leader) {
      ASSERT_LE(sent, space.send_bytes);
      const Shard& own = chunk.shards[nodes.node_of(rank.layout.rank())];
      ASSERT_LE(uint64_t{nodes.num_nodes()} * own.scatter_bytes, space.receive_bytes);
    }
    if (!gathers(world.limits.collective)) continue;
    for (const Rail& rail : chunk.rails) {
      ASSERT_LE(rail.gather_message_bytes, space.message_bytes);
      dense += kHeaderBytes + uint64_t{rail.num_elements} * item_bytes(chunk.dtype);
    }
    const uint64_t copies = nodes.is_flat() ? nodes.num_nodes() : space.num_siblings;
    const uint64_t each =
        nodes.is_flat() ? chunk.rails[0].gather_message_bytes : chunk.forward_bytes;
    ASSERT_LE(copies * each, space.gathered_bytes);
    if (!nodes.is_flat() && !world.limits.siblings_share) {
      ASSERT_LE(dense, space.dense_send_bytes);
    }
  }
}

// Each plans for itself, and posts collectives in an order that depends on its slots; siblings that
// share memory map the same, although extra ranks need less.
void check_alike(const World& world, const std::vector<Rank>& ranks,
                 const std::vector<Workspace>& spaces) {
  const Nodes& nodes = ranks[0].layout.nodes();
  for (uint32_t r = 0; r < spaces.size(); ++r) {
    if (!world.limits.siblings_share) {
      ASSERT_EQ(spaces[r].slots, spaces[0].slots);
      continue;
    }
    const std::vector<uint32_t> siblings = nodes.siblings(r);
    const Workspace &space = spaces[r], &first = spaces[siblings.front()];
    ASSERT_EQ(space.slots, first.slots);
    ASSERT_EQ(space.shared_bytes, first.shared_bytes);
    ASSERT_EQ(space.gathered_bytes, first.gathered_bytes);
    ASSERT_EQ(space.dense_place_bytes, first.dense_place_bytes);
    if (space.shared_bytes == 0) continue;
    const uint64_t places = uint64_t{nodes.num_rails()} * (siblings.size() - 1);
    ASSERT_LE(space.gathered_bytes + places * space.dense_place_bytes, space.shared_bytes);
    for (const ChunkPlan& chunk : ranks[r].plan.chunks) {
      for (const Rail& rail : chunk.rails) {
        ASSERT_LE(uint64_t{rail.num_elements} * item_bytes(chunk.dtype), space.dense_place_bytes);
      }
    }
  }
}

}  // namespace

void run(Bytes input) {
  const World world = take_world(input);
  const Nodes nodes(world.members);
  std::vector<Rank> ranks;
  for (uint32_t r = 0; r < nodes.world_size(); ++r) {
    Layout layout(world.parameters, r, nodes);
    PlanOptions options = world.options;
    options.rank = r;
    BucketPlan plan = make_plan(layout, world.bucket, options);
    ranks.push_back({std::move(layout), std::move(plan)});
  }
  std::vector<Workspace> spaces;
  for (uint32_t r = 0; r < ranks.size(); ++r) {
    ASSERT_EQ(ranks[r].plan.chunks.size(), ranks[0].plan.chunks.size());
    try {
      spaces.push_back(plan_workspace(ranks[r].layout, world.options.chunk_bytes, world.limits));
      check_fits(world, ranks[r], spaces.back());
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_NE(std::string(error.what()).find("workspace_cap_mb="), std::string::npos);
    }
  }
  if (spaces.size() == ranks.size()) check_alike(world, ranks, spaces);
}

}  // namespace gradferry::fuzzing
