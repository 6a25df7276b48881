#include "host/socket_lane.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "tensor_bytes.h"

namespace gradferry {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Then it is seen what has come, enough or not: a peer may send less than is waited for.
constexpr milliseconds kLongestPoll{1000};
constexpr std::chrono::hours kLongestTimeout{24 * 365};  // of the clock's range

// Owns a file descriptor. -1: none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }

  int number() const { return number_; }

 private:
  int number_ = -1;
};

// "rank 2: Connection reset by peer". `error`: an errno.
std::string system_text(uint32_t rank, int error) {
  // A keepalive found no answer. "Timed out" would read as the timeout of the process group.
  const std::string text =
      error == ETIMEDOUT ? "its machine does not answer" : std::generic_category().message(error);
  return "rank " + std::to_string(rank) + ": " + text;
}

// Takes as many bytes as there are, at most `left`, off `left`. Returns how many.
ssize_t take(size_t& left, ssize_t there) {
  const ssize_t taken = std::min(static_cast<ssize_t>(left), there);
  left -= static_cast<size_t>(taken);
  return taken;
}

}  // namespace

// The connections of all lanes.
class Sockets {
 public:
  class Transfer;
  using TransferPtr = c10::intrusive_ptr<Transfer>;
  struct Message {
    uint32_t to;
    const std::byte* begin;
    size_t size;
  };

  // `lanes`: connections by lane and rank.
  Sockets(uint32_t rank, std::vector<std::vector<Descriptor>> lanes, milliseconds timeout);

  void post(const TransferPtr& transfer, const std::vector<Message>& messages);
  // Until `transfer` has ended, or `end`.
  void serve(Transfer& transfer, Clock::time_point end);

  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return static_cast<uint32_t>(lanes_[0].connections.size()); }

 private:
  // Every message is preceded by its size, so that ranks that disagree on it see that at once.
  struct Unsent {
    uint64_t size;
    size_t size_left;  // bytes of `size`
    const std::byte* next;
    size_t left;
    TransferPtr transfer;
  };
  struct Connection {
    Descriptor socket;
    std::deque<Unsent> unsent;  // what the kernel did not take yet; under mutex_
    std::string broken;         // why nothing can be sent any more; under mutex_
    int wakes_at = 1;           // bytes that have come; of the thread that serves
  };
  // What is still to come from a rank.
  struct Part {
    Part(uint32_t rank, std::byte* begin, size_t num_bytes)
        : from(rank), next(begin), left(num_bytes), expected(num_bytes) {}
    bool complete() const { return size_left == 0 && left == 0; }

    uint32_t from;
    std::byte* next;
    size_t left;
    uint64_t expected;
    uint64_t size = 0;  // as the other rank says
    size_t size_left = sizeof(size);
  };
  struct LaneState {
    std::vector<Connection> connections;  // by rank
    std::deque<TransferPtr> transfers;    // for which something is to come; under mutex_
  };
  struct Polled {
    Connection* connection;
    uint32_t rank;
    TransferPtr transfer;
    Part* part;  // of `transfer`; null: nothing is to come
  };
  struct Awaited {
    std::vector<pollfd> polled;  // wake_, then connections
    std::vector<Polled> connections;
  };

  static void send_unsent(Connection& connection, uint32_t to);
  static bool receive(int socket, Part& to_come);
  Awaited what_to_wait_for();
  static void wake_when_there(Connection& connection, size_t num_bytes);
  void move(milliseconds longest);
  bool take_what_came(Awaited& awaited, bool all);
  void drop_received();

  const uint32_t rank_;
  const milliseconds timeout_;
  const Descriptor wake_;  // an eventfd: something was posted that the serving thread does not know
  std::vector<LaneState> lanes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool serving_ = false;
  uint64_t moves_ = 0;  // how often something was sent or came
};

// A collective under way.
class Sockets::Transfer final : public c10d::Work {
 public:
  Transfer(const std::shared_ptr<Sockets>& sockets, size_t index, at::Tensor receive,
           at::Tensor send)
      : lane(index), sockets_(sockets), receive_(std::move(receive)), send_(std::move(send)) {}

  bool wait(milliseconds longest) override {
    serve(longest);
    if (!isCompleted()) throw std::runtime_error("timed out, and goes on");
    if (exception()) std::rethrow_exception(exception());
    return true;
  }
  void fail(const std::string& why) {
    if (!isCompleted()) finish(std::make_exception_ptr(std::runtime_error(why)));
  }
  void end_if_done() {
    if (parts.empty() && num_unsent == 0 && !isCompleted()) finish();
  }

  const size_t lane;
  std::vector<Part> parts;  // of the thread that serves
  // Under the mutex of Sockets.
  size_t num_unsent = 0;
  std::optional<Clock::time_point> quiet_since;  // since it was first waited for
  uint64_t moves_seen = 0;

 private:
  void serve(milliseconds longest) {
    const auto end = longest == kNoTimeout ? Clock::time_point::max() : Clock::now() + longest;
    if (const auto sockets = sockets_.lock()) {
      sockets->serve(*this, end);
    } else {
      fail("the lanes were closed");
    }
  }

  const std::weak_ptr<Sockets> sockets_;  // which hold transfers
  at::Tensor receive_, send_;
};

Sockets::Sockets(uint32_t rank, std::vector<std::vector<Descriptor>> lanes, milliseconds timeout)
    : rank_(rank),
      timeout_(std::min<milliseconds>(timeout, kLongestTimeout)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      lanes_(lanes.size()) {
  if (wake_.number() < 0) {
    throw std::runtime_error("no eventfd: " + std::generic_category().message(errno));
  }
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    lanes_[lane].connections = std::vector<Connection>(lanes[lane].size());
    for (size_t to = 0; to < lanes[lane].size(); ++to) {
      lanes_[lane].connections[to].socket = std::move(lanes[lane][to]);
    }
  }
}

void Sockets::post(const TransferPtr& transfer, const std::vector<Message>& messages) {
  LaneState& lane = lanes_[transfer->lane];
  const std::lock_guard lock(mutex_);
  if (!transfer->parts.empty()) lane.transfers.push_back(transfer);
  for (const Message& message : messages) {
    Connection& connection = lane.connections[message.to];
    connection.unsent.push_back(
        {message.size, sizeof(message.size), message.begin, message.size, transfer});
    ++transfer->num_unsent;
    if (connection.unsent.size() == 1 || !connection.broken.empty()) {
      send_unsent(connection, message.to);
    }
  }
  transfer->end_if_done();
  if (!serving_) return;
  const uint64_t one = 1;
  // Only a counter that is full already refuses.
  [[maybe_unused]] const ssize_t written = write(wake_.number(), &one, sizeof(one));
}

// What the kernel takes now. With mutex_ held.
void Sockets::send_unsent(Connection& connection, uint32_t to) {
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
      connection.broken = system_text(to, errno);
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
bool Sockets::receive(int socket, Part& to_come) {
  auto* size_end = reinterpret_cast<std::byte*>(&to_come.size) + sizeof(to_come.size);
  iovec pieces[] = {{size_end - to_come.size_left, to_come.size_left},
                    {to_come.next, to_come.left}};
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = 2;
  ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  if (got == 0) {
    throw std::runtime_error("rank " + std::to_string(to_come.from) +
                             ": connection closed by peer");
  }
  if (got < 0) throw std::runtime_error(system_text(to_come.from, errno));
  const bool had_size = to_come.size_left == 0;
  got -= take(to_come.size_left, got);
  to_come.next += got;
  to_come.left -= static_cast<size_t>(got);
  if (!had_size && to_come.size_left == 0 && to_come.size != to_come.expected) {
    throw std::runtime_error("rank " + std::to_string(to_come.from) + " sends a message of " +
                             std::to_string(to_come.size) + " bytes where " +
                             std::to_string(to_come.expected) +
                             " were expected; is it at another step, or is its model another?");
  }
  return true;
}

void Sockets::serve(Transfer& transfer, Clock::time_point end) {
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
    std::vector<Part*> parts(lane.connections.size(), nullptr);
    TransferPtr first;
    if (!lane.transfers.empty()) first = lane.transfers.front();
    if (first) {
      for (Part& part : first->parts) parts[part.from] = &part;
    }
    for (uint32_t rank = 0; rank < lane.connections.size(); ++rank) {
      Connection& connection = lane.connections[rank];
      int16_t events = connection.unsent.empty() ? 0 : POLLOUT;
      if (const Part* part = parts[rank]) {
        events |= POLLIN;
        wake_when_there(connection, part->size_left + part->left);
      }
      if (events == 0) continue;
      awaited.polled.push_back({connection.socket.number(), events, 0});
      awaited.connections.push_back({&connection, rank, first, parts[rank]});
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
    send_unsent(*polled.connection, polled.rank);
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
      moved |= receive(polled.connection->socket.number(), *polled.part);
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
    std::erase_if(first->parts, [](const Part& part) { return part.complete(); });
    if (!first->parts.empty()) continue;
    lane.transfers.pop_front();
    first->end_if_done();
  }
}

// --- the lane ---

namespace {

// Puts the messages for the next ranks first, so that not all ranks send to the same one first.
void start_behind(uint32_t rank, std::vector<Sockets::Message>& messages) {
  std::ranges::rotate(messages, std::ranges::find_if(messages, [rank](const Sockets::Message& m) {
                        return m.to > rank;
                      }));
}

}  // namespace

SocketLane::SocketLane(std::shared_ptr<Sockets> sockets, size_t index)
    : sockets_(std::move(sockets)), index_(index) {}

uint32_t SocketLane::rank() const { return sockets_->rank(); }
uint32_t SocketLane::world_size() const { return sockets_->world_size(); }

Pending SocketLane::all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes,
                               at::Tensor send, std::vector<int64_t> send_bytes) {
  std::byte* to = bytes(receive);
  const std::byte* from = bytes(send);
  const auto transfer =
      c10::make_intrusive<Sockets::Transfer>(sockets_, index_, std::move(receive), std::move(send));
  std::vector<Sockets::Message> messages;
  for (uint32_t p = 0; p < world_size(); ++p) {
    if (p != rank()) {
      transfer->parts.emplace_back(p, to, static_cast<size_t>(receive_bytes[p]));
      messages.push_back({p, from, static_cast<size_t>(send_bytes[p])});
    }
    to += receive_bytes[p];
    from += send_bytes[p];
  }
  start_behind(rank(), messages);
  sockets_->post(transfer, messages);
  return transfer;
}

Pending SocketLane::all_gather(at::Tensor receive, at::Tensor send) {
  const auto size = static_cast<size_t>(send.numel());
  std::byte* to = bytes(receive);
  const std::byte* from = bytes(send);
  const auto transfer =
      c10::make_intrusive<Sockets::Transfer>(sockets_, index_, std::move(receive), std::move(send));
  std::vector<Sockets::Message> messages;
  for (uint32_t p = 0; p < world_size(); ++p, to += size) {
    if (p == rank()) continue;
    transfer->parts.emplace_back(p, to, size);
    messages.push_back({p, from, size});
  }
  start_behind(rank(), messages);
  sockets_->post(transfer, messages);
  return transfer;
}

std::vector<std::shared_ptr<Lane>> make_socket_lanes(
    uint32_t rank, const std::vector<std::vector<int>>& connections, milliseconds timeout) {
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
