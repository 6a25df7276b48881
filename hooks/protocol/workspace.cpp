#include "protocol/workspace.h"

#include <algorithm>
#include <string>

#include "gradferry/error.h"
#include "gradferry/wire.h"

namespace gradferry {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kChunksWithinLimit = 4;
// A full tile with 9 bits per element: one of q8, two of q4.
constexpr uint32_t kFewestChunkBytes = kTileElements / 8 * 9;
// Where parts of shared memory begin: no page, and no cache line, is of two of them.
constexpr uint64_t kPageBytes = 4096, kLineBytes = 64;

uint64_t round_up(uint64_t number, uint64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

// Adds what a leader with so many siblings needs between them.
void add_local_stage(Workspace& workspace, const Layout& layout, uint64_t num_siblings,
                     uint64_t most_dense, bool share) {
  const Nodes& nodes = layout.nodes();
  const uint64_t dense = std::min(most_dense, layout.largest_dense_bytes());
  const uint64_t dense_message = kHeaderBytes + (share ? 0 : dense);
  workspace.num_siblings = static_cast<uint32_t>(num_siblings);
  workspace.dense_send_bytes = num_siblings * dense_message;
  workspace.dense_receive_bytes = num_siblings * dense_message;
  workspace.sum_bytes = dense;
  // A device has the sum behind what it sends.
  workspace.send_bytes = round_up(workspace.send_bytes, kPayloadAlignment);
  workspace.gathered_bytes = num_siblings * (kHeaderBytes + workspace.receive_bytes);
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
  const uint64_t num_nodes = nodes.num_nodes();
  // Only the first tile of a chunk may be longer than chunk_bytes.
  const uint64_t usual =
      kHeaderBytes + std::min<uint64_t>(plan.chunk_bytes, layout.largest_shard_bytes());
  Workspace workspace;
  workspace.message_bytes = std::max<uint64_t>(usual, kHeaderBytes + layout.largest_tile_bytes());
  if (scatters(plan.collective)) {
    workspace.send_bytes = (num_nodes - 1) * usual + workspace.message_bytes;
    workspace.receive_bytes = num_nodes * workspace.message_bytes;
  }
  if (!gathers(plan.collective)) return workspace;
  if (!limits.keeps_gathered) workspace.gathered_bytes = num_nodes * workspace.message_bytes;
  if (!nodes.is_flat()) {
    add_local_stage(workspace, layout, num_siblings, plan.dense_bytes, limits.siblings_share);
  }
  workspace.own_message_bytes = limits.gathers_in_place ? 0 : workspace.message_bytes;
  return workspace;
}

// What four chunks may take of the limit.
uint64_t bytes_per_chunk(uint64_t workspace_cap_bytes) {
  return workspace_cap_bytes / 8 * 7 / kChunksWithinLimit;
}

}  // namespace

uint32_t chunk_bytes_within(uint64_t workspace_cap_bytes, uint32_t world_size, uint32_t most) {
  const uint64_t message_bytes =
      bytes_per_chunk(workspace_cap_bytes) / (3 * uint64_t{world_size} + 1);
  const uint64_t within = message_bytes - std::min<uint64_t>(message_bytes, kHeaderBytes);
  const uint64_t addressable = UINT32_MAX / world_size - kHeaderBytes;
  return static_cast<uint32_t>(
      std::min({std::max<uint64_t>(within, kFewestChunkBytes), addressable, uint64_t{most}}));
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
  if (!fits() && nodes.is_flat() && plan.collective == Collective::kAllReduce) {
    workspace.shared_receive = true;
    workspace.own_message_bytes = workspace.message_bytes;
  }
  const uint64_t needed = workspace.bytes() + limits.other_bytes;
  GRADFERRY_EXPECTS(fits(), kConfig,
                    "the messages of one chunk between " + std::to_string(nodes.world_size()) +
                        " ranks take " + std::to_string(needed) + " bytes, more than the " +
                        std::to_string(limits.cap_bytes) +
                        " that workspace_cap_mb allows; attach with workspace_cap_mb=" +
                        std::to_string((needed + kMiB - 1) / kMiB) + ", or with codec='off'");
  if (!nodes.is_leader(layout.rank())) drop_leaders_part(workspace);
  return workspace;
}

}  // namespace gradferry
