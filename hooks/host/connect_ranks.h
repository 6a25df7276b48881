// TCP connections between all ranks of a lane, which meet in a store.
//
// Every rank listens, and writes into the store where, with a random question and its answer. A
// rank connects to all ranks below it and accepts those above it. A rank that connects sends the
// question and its own number, and receives the answer, so that a process that cannot read the
// store cannot take a rank's place. As Python's core/connect.py, but for the text in the store.
#pragma once

#include <cstdint>
#include <functional>
#include <system_error>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "host/sockets.h"
#include "threads.h"

namespace gradferry {

struct Connecting {
  uint32_t rank;                // of this process
  uint32_t world_size;          // more than any rank
  std::vector<uint32_t> ranks;  // which call this with this number; this one is among them
  // Different for every call with one store; it also chooses among the interfaces that
  // GLOO_SOCKET_IFNAME lists.
  uint64_t number;
  TimePoint deadline;  // for the others to come
  // Called ten times a second or more often while this rank waits; what it throws ends the wait.
  // May be empty: nothing is called.
  std::function<void()> between_polls;
};

// Connects ranks with each other. Collective among them. `store`: with a prefix of its own.
// Returns sockets by rank that do not block; none for this one, and for those that do not call.
// Throws std::system_error or std::runtime_error when this rank cannot connect, or another did not
// before the deadline; nothing stays open, and no key of this rank in the store.
std::vector<Descriptor> connect_ranks(c10d::Store& store, const Connecting& how);

// Whether this process, or its host, has no more files to open.
bool is_out_of_files(const std::system_error& error);

}  // namespace gradferry
