#include "workspace.h"

#include <algorithm>
#include <string>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "plan.h"

namespace gradferry {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kChunksWithinLimit = 4;
// A full tile with 9 bits per element: one of q8, two of q4.
constexpr uint32_t kFewestChunkBytes = kTileElements / 8 * 9;

}  // namespace

uint32_t chunk_bytes_within(uint64_t workspace_cap_bytes, uint32_t world_size, uint32_t most) {
  const uint64_t messages = kChunksWithinLimit * (3 * uint64_t{world_size} + 1);
  const uint64_t message_bytes = workspace_cap_bytes / 8 * 7 / messages;
  const uint64_t within = message_bytes - std::min<uint64_t>(message_bytes, kHeaderBytes);
  const uint64_t addressable = UINT32_MAX / world_size - kHeaderBytes;
  return static_cast<uint32_t>(
      std::min({std::max<uint64_t>(within, kFewestChunkBytes), addressable, uint64_t{most}}));
}

Workspace plan_workspace(const Layout& layout, uint32_t chunk_bytes,
                         const WorkspaceLimits& limits) {
  const Nodes& nodes = layout.nodes();
  const uint64_t num_nodes = nodes.num_nodes(), num_siblings = nodes.siblings(layout.rank()).size();
  // Only the first tile of a chunk may be longer than chunk_bytes.
  const uint64_t usual =
      kHeaderBytes + std::min<uint64_t>(chunk_bytes, layout.largest_shard_bytes());
  Workspace workspace;
  workspace.message_bytes = std::max<uint64_t>(usual, kHeaderBytes + layout.largest_tile_bytes());
  workspace.send_bytes = (num_nodes - 1) * usual + workspace.message_bytes;
  workspace.receive_bytes = num_nodes * workspace.message_bytes;
  workspace.gathered_bytes = workspace.receive_bytes;
  if (!nodes.is_flat()) {
    const uint64_t dense = kHeaderBytes + std::min(kMostDenseBytes, layout.largest_dense_bytes());
    workspace.dense_send_bytes = num_siblings * dense;
    workspace.dense_receive_bytes = num_siblings * dense;
    workspace.sum_bytes =
        nodes.is_delegate(layout.rank()) ? 2 * dense : 0;  // of 16-bit numbers, in fp32
    workspace.gathered_bytes = num_siblings * (kHeaderBytes + workspace.receive_bytes);
    // A device has the sum behind what it sends.
    workspace.send_bytes =
        (workspace.send_bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
    if (!nodes.is_delegate(layout.rank())) {
      workspace.dense_receive_bytes = num_siblings * kHeaderBytes;
      workspace.send_bytes = workspace.receive_bytes = 0;
    }
  }
  workspace.own_message_bytes = limits.gathers_in_place ? 0 : workspace.message_bytes;
  const auto fits = [&] { return workspace.bytes() + limits.other_bytes <= limits.cap_bytes; };
  for (workspace.slots = limits.most_slots; workspace.slots >= 1; --workspace.slots) {
    if (fits()) return workspace;
  }
  workspace.slots = 1;
  if (nodes.is_flat()) {
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
  return workspace;
}

}  // namespace gradferry
