// Memory for the messages of chunks: how large chunks and buffers are, and how many chunks are in
// flight, so that an engine keeps within `workspace_cap_bytes` in a world of any size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/layout.h"
#include "protocol/plan.h"

namespace gradferry {

// Most payload bytes per owner and stage in one chunk, at most `most`: four chunks of such messages
// take at most seven eighths of the limit. The rest is for commits and hashes, and for tiles that
// are longer than this: of every owner a chunk may have one. Equal on ranks with equal arguments,
// as it must be.
uint32_t chunk_bytes_within(uint64_t workspace_cap_bytes, uint32_t world_size, uint32_t most);

// Most bytes of a rail's messages with tiles, in one stage of one chunk: a third of that memory for
// all rails. It matters only in worlds so large that the one tile of every owner would exceed it.
uint64_t rail_bytes_within(uint64_t workspace_cap_bytes, const Nodes& nodes);

// Most bytes of gradient per rail in one chunk, where nodes have several ranks: what messages of
// `chunk_bytes` leave of the memory for each of four chunks, at most kMostDenseBytes, and a full
// tile at least. On streams, for whole buckets, what they leave for each of two: one is packed
// while the other is decoded. Equal on ranks with equal arguments.
uint64_t dense_bytes_within(uint64_t workspace_cap_bytes, uint32_t chunk_bytes, const Nodes& nodes,
                            bool on_streams);

// Sizes in bytes.
struct Workspace {
  // Chunks in flight. Where siblings share no memory it is equal on all ranks with equal limits:
  // the order in which a device posts collectives depends on it.
  size_t slots = 1;
  uint64_t message_bytes = 0;   // the longest message, header included
  uint64_t send_bytes = 0;      // a chunk's messages to all peers; 0 in an all-gather
  uint64_t receive_bytes = 0;   // one message from every peer; 0 in an all-gather
  uint64_t gathered_bytes = 0;  // the messages of all owners; 0 in a reduce-scatter
  // Between siblings: gradients to and from all of them, and their sum. 0 with one rank per node.
  uint64_t dense_send_bytes = 0;
  uint64_t dense_receive_bytes = 0;
  uint64_t sum_bytes = 0;
  // Bytes of a slot in memory that all siblings share; 0: they share none. There, first what was
  // gathered, then for every rail the gradients from every other sibling, each in a place of
  // dense_place_bytes; the buffers above hold the headers only. Equal on all siblings, as is
  // `slots` there.
  uint64_t shared_bytes = 0;
  uint64_t dense_place_bytes = 0;
  uint32_t num_siblings = 1;
  // Bytes of the message to all ranks; 0 where it is written to its place among those of all.
  uint64_t own_message_bytes = 0;

  // Bytes of a slot: of this rank, with its part of what is shared.
  uint64_t gathered_part() const {
    return shared_bytes != 0 ? gathered_bytes / num_siblings : gathered_bytes;
  }
  uint64_t dense_bytes() const {
    const uint64_t shared =
        shared_bytes != 0 ? shared_bytes / num_siblings - gathered_part() : uint64_t{0};
    return dense_send_bytes + dense_receive_bytes + sum_bytes + shared;
  }
  uint64_t slot_bytes() const {
    return send_bytes + own_message_bytes + receive_bytes + gathered_part() + dense_bytes();
  }
  uint64_t bytes() const { return slots * slot_bytes(); }
};

struct WorkspaceLimits {
  uint64_t cap_bytes;    // of the engine
  uint64_t other_bytes;  // what it needs for other things
  size_t most_slots;
  bool gathers_in_place;        // the message to all ranks is written to its place
  bool siblings_share = false;  // memory; only with several ranks on this rank's node
  bool keeps_gathered = false;  // the messages of all owners have memory of their own
};

// The workspace with as many slots as the limit allows, for chunks that are cut so. Throws
// Error(kConfig) if it allows none: the owner of a tile receives it from every rank at once.
Workspace plan_workspace(const Layout& layout, const PlanOptions& plan,
                         const WorkspaceLimits& limits);

}  // namespace gradferry
