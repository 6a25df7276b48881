#include "host/socket_lane.h"

#include <utility>

#include "host/sockets.h"
#include "tensor_bytes.h"

namespace gradferry {
SocketLane::SocketLane(std::shared_ptr<Sockets> sockets, size_t index)
    : sockets_(std::move(sockets)), index_(index) {}

uint32_t SocketLane::rank() const { return sockets_->rank(); }
uint32_t SocketLane::world_size() const { return sockets_->world_size(); }

Pending SocketLane::all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes,
                               at::Tensor send, std::vector<int64_t> send_bytes) {
  std::vector<Sockets::Messages> messages;
  const std::byte* to = bytes(send);
  std::byte* from = bytes(receive);
  for (uint32_t p = 0; p < world_size(); ++p) {
    messages.push_back(
        {to, static_cast<size_t>(send_bytes[p]), from, static_cast<size_t>(receive_bytes[p])});
    to += send_bytes[p];
    from += receive_bytes[p];
  }
  return sockets_->post(index_, std::move(receive), std::move(send), messages);
}

Pending SocketLane::all_gather(at::Tensor receive, at::Tensor send) {
  const auto size = static_cast<size_t>(send.numel());
  std::vector<Sockets::Messages> messages;
  for (uint32_t p = 0; p < world_size(); ++p) {
    messages.push_back({bytes(send), size, bytes(receive) + p * size, size});
  }
  return sockets_->post(index_, std::move(receive), std::move(send), messages);
}

std::vector<std::shared_ptr<Lane>> make_socket_lanes(
    uint32_t rank, const std::vector<std::vector<int>>& connections,
    std::chrono::milliseconds timeout) {
  std::vector<std::vector<Descriptor>> owned(connections.size());
  for (size_t lane = 0; lane < connections.size(); ++lane) {
    for (const int number : connections[lane]) owned[lane].emplace_back(number);
  }
  const auto sockets = std::make_shared<Sockets>(rank, std::move(owned), timeout);
  std::vector<std::shared_ptr<Lane>> lanes;
  for (size_t lane = 0; lane < connections.size(); ++lane) {
    lanes.push_back(std::make_shared<SocketLane>(sockets, lane));
  }
  return lanes;
}

}  // namespace gradferry
