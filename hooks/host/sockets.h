// Lanes over TCP connections of our own. No thread of their own serves them: the posting thread
// writes what the kernel takes at once; a thread that waits for a collective writes the rest and
// reads, for all lanes, straight to where the bytes belong. So a thread must wait for every
// collective. The kernel wakes it once per message, not once per packet.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lane.h"
#include "protocol/faults.h"

namespace gradferry {

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

// The connections of all lanes.
class Sockets : public std::enable_shared_from_this<Sockets> {
 public:
  // What goes to a rank and what comes from it.
  struct Messages {
    const std::byte* to = nullptr;
    size_t to_bytes = 0;
    std::byte* from = nullptr;
    size_t from_bytes = 0;
  };

  // `lanes`: connections by lane and rank; without one to a rank that the lane leaves out.
  // `world_ranks`: for errors.
  Sockets(uint32_t rank, std::vector<std::vector<Descriptor>> lanes,
          std::chrono::milliseconds timeout, const WorldRanks& world_ranks = {});

  ~Sockets();
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;

  // `messages`: by rank, in the memory of `receive` and `send`; this rank's own, those of ranks
  // that the lane leaves out, and those of no bytes are not moved.
  Pending post(size_t lane, at::Tensor receive, at::Tensor send,
               const std::vector<Messages>& messages);

  std::vector<int> descriptors(size_t lane) const;
  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return static_cast<uint32_t>(lanes_[0].connections.size()); }

 private:
  using milliseconds = std::chrono::milliseconds;
  using Clock = std::chrono::steady_clock;
  class SocketTransfer;
  using TransferPtr = c10::intrusive_ptr<SocketTransfer>;

  // Every message is preceded by its size, so that ranks that disagree on it see that at once.
  struct Unsent {
    uint64_t size;
    size_t size_left;  // bytes of `size`
    const std::byte* next;
    size_t left;
    TransferPtr transfer;
  };
  struct Connection {
    bool exists() const { return socket.number() >= 0; }

    Descriptor socket;
    std::string name;           // of the rank there, as errors have it
    std::deque<Unsent> unsent;  // what the kernel did not take yet; under mutex_
    std::string broken;         // why nothing can be sent any more; under mutex_
    int wakes_at = 1;           // bytes that have come; of the thread that serves
  };
  // What is still to come from a rank.
  struct Incoming {
    Incoming(uint32_t rank, std::byte* begin, size_t num_bytes)
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
    TransferPtr transfer;
    Incoming* part;  // of `transfer`; null: nothing is to come
  };
  struct Awaited {
    std::vector<pollfd> polled;  // wake_, then connections
    std::vector<Polled> connections;
  };

  // Until `transfer` has ended, or `end`.
  void serve(SocketTransfer& transfer, Clock::time_point end);
  static void send_unsent(Connection& connection);
  static bool receive(const Connection& connection, Incoming& to_come);
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

class SocketLane final : public Lane {
 public:
  // `ranks`: of the lane, in its order.
  SocketLane(std::shared_ptr<Sockets> sockets, size_t index, std::vector<uint32_t> ranks);

  // The caller gives all lengths, so no byte of a peer decides how much is read. Nothing is copied
  // in memory, not even this rank's own part. Any thread may wait, for any collective.
  Pending all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes, at::Tensor send,
                     std::vector<int64_t> send_bytes) override;
  Pending all_gather(at::Tensor receive, std::vector<int64_t> receive_bytes,
                     at::Tensor send) override;
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
