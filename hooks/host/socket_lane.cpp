#include "host/socket_lane.h"

#include <algorithm>
#include <utility>

#include "tensor_bytes.h"

namespace gradferry {
SocketLane::SocketLane(std::shared_ptr<Sockets> sockets, size_t index, std::vector<uint32_t> ranks)
    : sockets_(std::move(sockets)),
      index_(index),
      ranks_(std::move(ranks)),
      rank_(static_cast<uint32_t>(std::ranges::find(ranks_, sockets_->rank()) - ranks_.begin())) {}

Pending SocketLane::all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes,
                               at::Tensor send, std::vector<int64_t> send_bytes) {
  std::vector<Sockets::Messages> messages(sockets_->world_size());
  const std::byte* to = bytes(send);
  std::byte* from = bytes(receive);
  for (uint32_t p = 0; p < world_size(); ++p) {
    messages[ranks_[p]] = {to, static_cast<size_t>(send_bytes[p]), from,
                           static_cast<size_t>(receive_bytes[p])};
    to += send_bytes[p];
    from += receive_bytes[p];
  }
  return sockets_->post(index_, std::move(receive), std::move(send), messages);
}

Pending SocketLane::all_gather(at::Tensor receive, at::Tensor send) {
  const auto size = static_cast<size_t>(send.numel());
  std::vector<Sockets::Messages> messages(sockets_->world_size());
  for (uint32_t p = 0; p < world_size(); ++p) {
    messages[ranks_[p]] = {bytes(send), size, bytes(receive) + p * size, size};
  }
  return sockets_->post(index_, std::move(receive), std::move(send), messages);
}

std::vector<std::shared_ptr<Lane>> make_socket_lanes(uint32_t rank, std::vector<LaneSockets> lanes,
                                                     std::chrono::milliseconds timeout,
                                                     const WorldRanks& world_ranks) {
  std::vector<std::vector<Descriptor>> connections;
  for (LaneSockets& lane : lanes) connections.push_back(std::move(lane.connections));
  const auto sockets =
      std::make_shared<Sockets>(rank, std::move(connections), timeout, world_ranks);
  std::vector<std::shared_ptr<Lane>> made;
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    made.push_back(std::make_shared<SocketLane>(sockets, lane, std::move(lanes[lane].ranks)));
  }
  return made;
}

}  // namespace gradferry
