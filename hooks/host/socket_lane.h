// Lanes over TCP connections of our own. No thread of their own serves them: the posting thread
// writes what the kernel takes at once; a thread that waits for a collective writes the rest and
// reads, for all lanes, straight to where the bytes belong. So a thread must wait for every
// collective. The kernel wakes it once per message, not once per packet.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "lane.h"

namespace gradferry {

class Sockets;

class SocketLane final : public Lane {
 public:
  SocketLane(std::shared_ptr<Sockets> sockets, size_t index);

  // The caller gives all lengths, so no byte of a peer decides how much is read. Nothing is copied
  // in memory, not even this rank's own part. Any thread may wait, for any collective.
  Pending all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes, at::Tensor send,
                     std::vector<int64_t> send_bytes) override;
  Pending all_gather(at::Tensor receive, at::Tensor send) override;
  uint32_t rank() const override;
  uint32_t world_size() const override;

 private:
  std::shared_ptr<Sockets> sockets_;
  size_t index_;
};

// Lanes on connections: by lane and rank, descriptors of stream sockets that do not block, and
// anything at this rank's own place. Takes them over, also when it throws. `timeout`: how long a
// collective may be without any progress.
std::vector<std::shared_ptr<Lane>> make_socket_lanes(
    uint32_t rank, const std::vector<std::vector<int>>& connections,
    std::chrono::milliseconds timeout);

}  // namespace gradferry
