// TCP connections between ranks, which meet in a store.
//
// Every rank listens, and writes into the store where, with a random question and its answer. A
// rank connects to all ranks below it, once for each lane that they have in common, and accepts
// those above it. Who connects sends the question, its own number and that of the lane, and
// receives the answer, so that a process that cannot read the store cannot take a rank's place.
#pragma once

#include <cstdint>
#include <functional>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "host/sockets.h"
#include "protocol/faults.h"
#include "threads.h"

namespace gradferry {

struct Connecting {
  uint32_t rank;           // of this process
  uint32_t world_size;     // more than any rank
  WorldRanks world_ranks;  // for errors
  // The ranks of each lane, in its order; this one is among them. A lane has the same number on
  // all of its ranks.
  std::vector<std::vector<uint32_t>> lanes;
  TimePoint deadline;  // for the others to come
  // Called ten times a second while this rank waits; what it throws ends the wait. May be empty.
  std::function<void()> between_polls;
};

// Connects ranks with each other. Collective among them. `store`: with a prefix that no other call
// has. Returns the sockets of each lane.
// Throws EchoError when another rank did not come before the deadline, or is gone; Error(kPeer)
// when this rank cannot connect. Nothing stays open then. What this rank has written stays in the
// store, under its number, because others may be about to read it.
std::vector<LaneSockets> connect_ranks(c10d::Store& store, const Connecting& how);

}  // namespace gradferry
