// Lanes over TCP connections of our own. No thread of their own serves them: the posting thread
// writes what the kernel takes at once; a thread that waits for a collective writes the rest and
// reads, for all lanes, straight to where the bytes belong. So a thread must wait for every
// collective. The kernel wakes it once per message, not once per packet.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "host/sockets.h"
#include "lane.h"
#include "protocol/faults.h"

namespace gradferry {

class SocketLane final : public Lane {
 public:
  // `ranks`: of the lane, in its order.
  SocketLane(std::shared_ptr<Sockets> sockets, size_t index, std::vector<uint32_t> ranks);

  // The caller gives all lengths, so no byte of a peer decides how much is read. Nothing is copied
  // in memory, not even this rank's own part. Any thread may wait, for any collective.
  Pending all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes, at::Tensor send,
                     std::vector<int64_t> send_bytes) override;
  Pending all_gather(at::Tensor receive, at::Tensor send) override;
  uint32_t rank() const override { return rank_; }
  uint32_t world_size() const override { return static_cast<uint32_t>(ranks_.size()); }
  // The descriptors of the connections, by rank; -1: there is none. They stay the lane's.
  std::vector<int> descriptors() const { return sockets_->descriptors(index_); }

 private:
  std::shared_ptr<Sockets> sockets_;
  size_t index_;
  std::vector<uint32_t> ranks_;  // of Sockets
  uint32_t rank_;
};

// A lane on connections.
struct LaneSockets {
  std::vector<uint32_t> ranks;  // between which it is, in its order; with this one
  // By rank: stream sockets that do not block; none to this one, and to those that it leaves out.
  std::vector<Descriptor> connections;
};

// Lanes on connections. `timeout`: how long a collective may be without any progress.
// `world_ranks`: for errors.
std::vector<std::shared_ptr<Lane>> make_socket_lanes(uint32_t rank, std::vector<LaneSockets> lanes,
                                                     std::chrono::milliseconds timeout,
                                                     const WorldRanks& world_ranks = {});

}  // namespace gradferry
