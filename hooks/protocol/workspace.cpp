#include "protocol/workspace.h"

#include <algorithm>
#include <string>

#include "gradferry/error.h"
#include "gradferry/wire.h"

namespace gradferry {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kChunksWithinLimit = 4;
// Where parts of shared memory begin: no page, and no cache line, is of two of them.
constexpr uint64_t kPageBytes = 4096, kLineBytes = 64;

// Of a chunk's messages of `message_bytes` at most between the peers of a rail, in one stage.
uint64_t stage_bytes(const Nodes& nodes, const PlanOptions& plan, uint64_t message_bytes) {
  const uint64_t most = nodes.num_nodes() * message_bytes;
  const uint64_t with_tiles = std::min(most, std::max(plan.rail_bytes, message_bytes));
  const uint64_t sent = with_tiles + kMostWithoutTiles * kHeaderBytes;
  return std::min(most, sent + sent / kPaddingPart);
}

// Adds what a leader with so many siblings needs between them.
void add_local_stage(Workspace& workspace, const Layout& layout, uint64_t num_siblings,
                     uint64_t most_dense, uint64_t rail_bytes, bool share) {
  const Nodes& nodes = layout.nodes();
  const uint64_t dense = std::min(most_dense, layout.largest_dense_bytes());
  const uint64_t dense_message = kHeaderBytes + (share ? 0 : dense);
  workspace.num_siblings = static_cast<uint32_t>(num_siblings);
  workspace.dense_send_bytes = num_siblings * dense_message;
  workspace.dense_receive_bytes = num_siblings * dense_message;
  workspace.sum_bytes = dense;
  // A device has the sum behind what it sends.
  workspace.send_bytes = round_up(workspace.send_bytes, kPayloadAlignment);
  workspace.gathered_bytes = num_siblings * (kHeaderBytes + rail_bytes);
  if (!share) return;
  workspace.gathered_bytes = round_up(workspace.gathered_bytes, kPageBytes);
  workspace.dense_place_bytes = round_up(dense, kLineBytes);
  const uint64_t places = nodes.num_rails() * (num_siblings - 1);
  workspace.shared_bytes =
      round_up(workspace.gathered_bytes + places * workspace.dense_place_bytes, kPageBytes);
}

// Takes away what an extra rank does not need of it.
void drop_leaders_part(Workspace& workspace) {
  workspace.dense_receive_bytes = uint64_t{workspace.num_siblings} * kHeaderBytes;
  workspace.sum_bytes = workspace.send_bytes = workspace.receive_bytes = 0;
}

// One slot of a leader with so many siblings.
Workspace one_slot(const Layout& layout, const PlanOptions& plan, const WorkspaceLimits& limits,
                   uint64_t num_siblings) {
  const Nodes& nodes = layout.nodes();
  const uint64_t usual = std::min<uint64_t>(plan.chunk_bytes, layout.largest_shard_bytes());
  Workspace workspace;
  workspace.message_bytes = kHeaderBytes + std::max<uint64_t>(usual, layout.largest_tile_bytes());
  const uint64_t of_stage = stage_bytes(nodes, plan, workspace.message_bytes);
  if (scatters(plan.collective)) {
    workspace.send_bytes = of_stage;
    workspace.receive_bytes = nodes.num_nodes() * workspace.message_bytes;
  }
  if (!gathers(plan.collective)) return workspace;
  if (!limits.keeps_gathered) workspace.gathered_bytes = of_stage;
  if (!nodes.is_flat()) {
    add_local_stage(workspace, layout, num_siblings, plan.dense_bytes, of_stage,
                    limits.siblings_share);
  }
  workspace.own_message_bytes = limits.gathers_in_place ? 0 : workspace.message_bytes;
  return workspace;
}

// What four chunks may take of the limit.
uint64_t bytes_per_chunk(uint64_t workspace_cap_bytes) {
  return workspace_cap_bytes / 8 * 7 / kChunksWithinLimit;
}

// The least limit, in MiB, that allows this rank a slot: chunks grow with it.
uint64_t least_cap_mb(const Layout& layout, PlanOptions plan, WorkspaceLimits limits) {
  const Nodes& nodes = layout.nodes();
  const uint64_t siblings = nodes.siblings(layout.rank()).size();
  while (true) {
    const uint64_t needed = one_slot(layout, plan, limits, siblings).bytes() + limits.other_bytes;
    if (needed <= limits.cap_bytes) return limits.cap_bytes / kMiB;
    limits.cap_bytes = round_up(needed, kMiB);
    plan.rail_bytes = rail_bytes_within(limits.cap_bytes, nodes);
    plan.dense_bytes =
        dense_bytes_within(limits.cap_bytes, plan.chunk_bytes, nodes, plan.equal_scatter);
  }
}

}  // namespace

uint32_t chunk_bytes_within(uint64_t workspace_cap_bytes, uint32_t world_size, uint32_t most) {
  const uint64_t message_bytes =
      bytes_per_chunk(workspace_cap_bytes) / (3 * uint64_t{world_size} + 1);
  const uint64_t within = message_bytes - std::min<uint64_t>(message_bytes, kHeaderBytes);
  const uint64_t addressable = UINT32_MAX / world_size - kHeaderBytes;
  return static_cast<uint32_t>(std::min({within, addressable, uint64_t{most}}));
}

uint64_t rail_bytes_within(uint64_t workspace_cap_bytes, const Nodes& nodes) {
  return bytes_per_chunk(workspace_cap_bytes) / 3 / nodes.num_rails();
}

uint64_t dense_bytes_within(uint64_t workspace_cap_bytes, uint32_t chunk_bytes, const Nodes& nodes,
                            bool on_streams) {
  const uint64_t most_siblings = nodes.most_siblings();
  // To every peer, from every peer, and what each sibling has gathered from its own.
  const uint64_t messages =
      (2 + most_siblings) * nodes.num_nodes() * (kHeaderBytes + uint64_t{chunk_bytes});
  const uint64_t memory = bytes_per_chunk(workspace_cap_bytes) * (on_streams ? 2 : 1);
  // To every sibling, from every sibling, and the sum.
  const uint64_t dense = (memory - std::min(memory, messages)) / (2 * most_siblings + 1);
  constexpr uint64_t kFewest = kTileElements * sizeof(double);
  return std::clamp(dense - std::min<uint64_t>(dense, 2 * kHeaderBytes), kFewest,
                    on_streams ? UINT32_MAX / (2 * most_siblings) : kMostDenseBytes);
}

Workspace plan_workspace(const Layout& layout, const PlanOptions& plan,
                         const WorkspaceLimits& limits) {
  const Nodes& nodes = layout.nodes();
  Workspace workspace = one_slot(layout, plan, limits, nodes.siblings(layout.rank()).size());
  const auto fits = [&] { return workspace.bytes() + limits.other_bytes <= limits.cap_bytes; };
  // The slots of the ranks with the most siblings, who need the most.
  const uint64_t needed_by_most =
      std::max<uint64_t>(one_slot(layout, plan, limits, nodes.most_siblings()).slot_bytes(), 1);
  const uint64_t left = limits.cap_bytes - std::min(limits.cap_bytes, limits.other_bytes);
  workspace.slots = std::clamp<uint64_t>(left / needed_by_most, 1, limits.most_slots);
  while (workspace.slots > 1 && !fits()) --workspace.slots;  // pages that fewer ranks share
  GRADFERRY_EXPECTS(fits(), kConfig,
                    "the messages of one chunk between " + std::to_string(nodes.world_size()) +
                        " ranks take " + std::to_string(workspace.bytes() + limits.other_bytes) +
                        " bytes, more than the " + std::to_string(limits.cap_bytes) +
                        " that workspace_cap_mb allows; attach with " +
                        "workspace_cap_mb=" + std::to_string(least_cap_mb(layout, plan, limits)) +
                        ", or with codec='off'");
  if (!nodes.is_leader(layout.rank())) drop_leaders_part(workspace);
  return workspace;
}

}  // namespace gradferry
