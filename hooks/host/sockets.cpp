#include "host/sockets.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <optional>
#include <stdexcept>
#include <system_error>

namespace gradferry {
namespace {

using std::chrono::milliseconds;

// Then it is seen what has come, enough or not: a peer may send less than is waited for.
constexpr milliseconds kLongestPoll{1000};
constexpr std::chrono::hours kLongestTimeout{24 * 365};  // of the clock's range

// "rank 2: Connection reset by peer". `error`: an errno.
std::string system_text(const std::string& name, int error) {
  // A keepalive found no answer. "Timed out" would read as the timeout of the process group.
  const std::string text =
      error == ETIMEDOUT ? "its machine does not answer" : std::generic_category().message(error);
  return name + ": " + text;
}

// Takes as many bytes as there are, at most `left`, off `left`. Returns how many.
ssize_t take(size_t& left, ssize_t there) {
  const ssize_t taken = std::min(static_cast<ssize_t>(left), there);
  left -= static_cast<size_t>(taken);
  return taken;
}

}  // namespace

// A collective under way.
class Sockets::SocketTransfer final : public c10d::Work {
 public:
  SocketTransfer(std::weak_ptr<Sockets> sockets, at::Tensor receive, at::Tensor send)
      : sockets_(std::move(sockets)), receive_(std::move(receive)), send_(std::move(send)) {}

  bool wait(milliseconds longest) override;
  void fail(const std::string& why);
  void end_if_done();

  std::vector<Incoming> parts;  // of the thread that serves
  // Under the mutex of Sockets.
  size_t num_unsent = 0;
  std::optional<Clock::time_point> quiet_since;  // since it was first waited for
  uint64_t moves_seen = 0;

 private:
  const std::weak_ptr<Sockets> sockets_;  // which hold transfers
  at::Tensor receive_, send_;
};

bool Sockets::SocketTransfer::wait(milliseconds longest) {
  if (const auto sockets = sockets_.lock()) {
    sockets->serve(*this,
                   longest == kNoTimeout ? Clock::time_point::max() : Clock::now() + longest);
  } else {
    fail("the lanes were closed");
  }
  if (!isCompleted()) throw std::runtime_error("timed out, and goes on");
  if (exception()) std::rethrow_exception(exception());
  return true;
}

void Sockets::SocketTransfer::fail(const std::string& why) {
  if (!isCompleted()) finish(std::make_exception_ptr(std::runtime_error(why)));
}

void Sockets::SocketTransfer::end_if_done() {
  if (parts.empty() && num_unsent == 0 && !isCompleted()) finish();
}

Sockets::Sockets(uint32_t rank, std::vector<std::vector<Descriptor>> lanes, milliseconds timeout,
                 const WorldRanks& world_ranks)
    : rank_(rank),
      timeout_(std::min<milliseconds>(timeout, kLongestTimeout)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      lanes_(lanes.size()) {
  if (wake_.number() < 0) {
    throw std::runtime_error("no eventfd: " + std::generic_category().message(errno));
  }
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    lanes_[lane].connections = std::vector<Connection>(lanes[lane].size());
    for (uint32_t to = 0; to < lanes[lane].size(); ++to) {
      Connection& connection = lanes_[lane].connections[to];
      connection.socket = std::move(lanes[lane][to]);
      connection.name = name_ranks({in_world(world_ranks, to)});
    }
  }
}

Sockets::~Sockets() = default;

std::vector<int> Sockets::descriptors(size_t lane) const {
  std::vector<int> numbers;
  for (const Connection& each : lanes_[lane].connections) numbers.push_back(each.socket.number());
  return numbers;
}

Pending Sockets::post(size_t lane, at::Tensor receive, at::Tensor send,
                      const std::vector<Messages>& messages) {
  const auto transfer =
      c10::make_intrusive<SocketTransfer>(weak_from_this(), std::move(receive), std::move(send));
  auto& [connections, transfers] = lanes_[lane];
  for (uint32_t from = 0; from < world_size(); ++from) {
    if (!connections[from].exists() || messages[from].from_bytes == 0) continue;
    transfer->parts.emplace_back(from, messages[from].from, messages[from].from_bytes);
  }
  const std::lock_guard lock(mutex_);
  if (!transfer->parts.empty()) transfers.push_back(transfer);
  // The next rank first, so that not all ranks send to the same one first.
  for (uint32_t i = 1; i < world_size(); ++i) {
    const uint32_t to = (rank_ + i) % world_size();
    Connection& connection = connections[to];
    const uint64_t size = messages[to].to_bytes;
    if (!connection.exists() || size == 0) continue;
    connection.unsent.push_back({size, sizeof(size), messages[to].to, size, transfer});
    ++transfer->num_unsent;
    if (connection.unsent.size() == 1 || !connection.broken.empty()) send_unsent(connection);
  }
  transfer->end_if_done();
  if (serving_) {
    const uint64_t one = 1;
    // Fails only if the counter is full already.
    [[maybe_unused]] const ssize_t written = write(wake_.number(), &one, sizeof(one));
  }
  return transfer;
}

// What the kernel takes now. With mutex_ held.
void Sockets::send_unsent(Connection& connection) {
  while (!connection.unsent.empty() && connection.broken.empty()) {
    Unsent& first = connection.unsent.front();
    auto* size_end = reinterpret_cast<std::byte*>(&first.size) + sizeof(first.size);
    iovec pieces[] = {{size_end - first.size_left, first.size_left},
                      {const_cast<std::byte*>(first.next), first.left}};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = 2;
    ssize_t sent = sendmsg(connection.socket.number(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) {
      connection.broken = system_text(connection.name, errno);
      break;
    }
    sent -= take(first.size_left, sent);
    first.next += sent;
    first.left -= static_cast<size_t>(sent);
    if (first.size_left != 0 || first.left != 0) return;
    --first.transfer->num_unsent;
    first.transfer->end_if_done();
    connection.unsent.pop_front();
  }
  if (connection.broken.empty()) return;
  for (const Unsent& unsent : connection.unsent) unsent.transfer->fail(connection.broken);
  connection.unsent.clear();
}

// Whether something came. Throws what a connection that is gone means.
bool Sockets::receive(const Connection& connection, Incoming& to_come) {
  auto* size_end = reinterpret_cast<std::byte*>(&to_come.size) + sizeof(to_come.size);
  iovec pieces[] = {{size_end - to_come.size_left, to_come.size_left},
                    {to_come.next, to_come.left}};
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = 2;
  ssize_t got = recvmsg(connection.socket.number(), &message, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  if (got == 0) {
    throw std::runtime_error(connection.name + ": connection closed by peer");
  }
  if (got < 0) throw std::runtime_error(system_text(connection.name, errno));
  const bool had_size = to_come.size_left == 0;
  got -= take(to_come.size_left, got);
  to_come.next += got;
  to_come.left -= static_cast<size_t>(got);
  if (!had_size && to_come.size_left == 0 && to_come.size != to_come.expected) {
    throw std::runtime_error(connection.name + " sends a message of " +
                             std::to_string(to_come.size) + " bytes where " +
                             std::to_string(to_come.expected) + " were expected");
  }
  return true;
}

void Sockets::serve(SocketTransfer& transfer, Clock::time_point end) {
  std::unique_lock lock(mutex_);
  // Once at least, however late it is: what has come counts.
  for (bool once = false; !transfer.isCompleted(); once = true) {
    const auto now = Clock::now();
    if (once && now >= end) return;
    if (!transfer.quiet_since || std::exchange(transfer.moves_seen, moves_) != moves_) {
      transfer.quiet_since = now;
      transfer.moves_seen = moves_;
    }
    const auto last = *transfer.quiet_since + timeout_;
    const auto longest = std::max(std::min(last, end), now) - now;
    if (serving_) {
      changed_.wait_for(lock, longest);
    } else {
      serving_ = true;
      lock.unlock();
      std::string error;
      try {
        move(std::chrono::ceil<milliseconds>(longest));
      } catch (const std::exception& thrown) {
        error = thrown.what();
      }
      lock.lock();
      serving_ = false;
      if (!error.empty()) transfer.fail(error);
      changed_.notify_all();
    }
    // Another thread that waits for the same collective may have seen it move.
    const auto quiet_until = *transfer.quiet_since + timeout_;
    if (moves_ == transfer.moves_seen && Clock::now() >= quiet_until) transfer.fail("timed out");
  }
}

// What is first in every lane, and all that is unsent.
Sockets::Awaited Sockets::what_to_wait_for() {
  Awaited awaited{{{wake_.number(), POLLIN, 0}}, {}};
  const std::lock_guard lock(mutex_);
  for (LaneState& lane : lanes_) {
    std::vector<Incoming*> parts(lane.connections.size(), nullptr);
    TransferPtr first;
    if (!lane.transfers.empty()) first = lane.transfers.front();
    if (first) {
      for (Incoming& part : first->parts) parts[part.from] = &part;
    }
    for (uint32_t rank = 0; rank < lane.connections.size(); ++rank) {
      Connection& connection = lane.connections[rank];
      int16_t events = connection.unsent.empty() ? 0 : POLLOUT;
      if (const Incoming* part = parts[rank]) {
        events |= POLLIN;
        wake_when_there(connection, part->size_left + part->left);
      }
      if (events == 0) continue;
      awaited.polled.push_back({connection.socket.number(), events, 0});
      awaited.connections.push_back({&connection, first, parts[rank]});
    }
  }
  return awaited;
}

void Sockets::wake_when_there(Connection& connection, size_t num_bytes) {
  const int enough = static_cast<int>(std::min<size_t>(num_bytes, INT_MAX / 2));
  // The kernel takes less where it must: then there is more than one waking.
  if (std::exchange(connection.wakes_at, enough) == enough) return;
  setsockopt(connection.socket.number(), SOL_SOCKET, SO_RCVLOWAT, &enough, sizeof(enough));
}

// Waits until the kernel has brought something for any lane, or takes something, and moves that.
// All lanes, because a peer may wait for another one, and can send there only what is read here.
void Sockets::move(milliseconds longest) {
  Awaited awaited = what_to_wait_for();
  const int ready = poll(awaited.polled.data(), awaited.polled.size(),
                         static_cast<int>(std::min(longest, kLongestPoll).count()));
  if (ready < 0) {
    if (errno == EINTR) return;
    throw std::runtime_error("cannot wait for messages: " + std::generic_category().message(errno));
  }
  if (awaited.polled[0].revents != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = read(wake_.number(), &count, sizeof(count));
  }
  bool moved = take_what_came(awaited, ready == 0);
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < awaited.connections.size(); ++i) {
    const Polled& polled = awaited.connections[i];
    if (polled.connection->unsent.empty() || (awaited.polled[1 + i].revents & ~POLLIN) == 0) {
      continue;
    }
    send_unsent(*polled.connection);
    moved = true;
  }
  drop_received();
  if (moved) ++moves_;
}

// Without mutex_: others may post meanwhile.
bool Sockets::take_what_came(Awaited& awaited, bool all) {
  bool moved = false;
  for (size_t i = 0; i < awaited.connections.size(); ++i) {
    Polled& polled = awaited.connections[i];
    if (polled.part == nullptr) continue;
    if (!all && (awaited.polled[1 + i].revents & ~POLLOUT) == 0) continue;
    try {
      moved |= receive(*polled.connection, *polled.part);
    } catch (const std::exception& error) {
      const std::lock_guard lock(mutex_);
      polled.transfer->fail(error.what());
      polled.part->size_left = polled.part->left = 0;  // nothing more comes
      moved = true;
    }
  }
  return moved;
}

// With mutex_ held.
void Sockets::drop_received() {
  for (LaneState& lane : lanes_) {
    if (lane.transfers.empty()) continue;
    const TransferPtr first = lane.transfers.front();
    std::erase_if(first->parts, [](const Incoming& part) { return part.complete(); });
    if (!first->parts.empty()) continue;
    lane.transfers.pop_front();
    first->end_if_done();
  }
}

// --- SocketLane ---

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

Pending SocketLane::all_gather(at::Tensor receive, std::vector<int64_t> receive_bytes,
                               at::Tensor send) {
  const auto size = static_cast<size_t>(send.numel());
  std::vector<Sockets::Messages> messages(sockets_->world_size());
  std::byte* from = bytes(receive);
  for (uint32_t p = 0; p < world_size(); ++p) {
    messages[ranks_[p]] = {bytes(send), size, from, static_cast<size_t>(receive_bytes[p])};
    from += receive_bytes[p];
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
