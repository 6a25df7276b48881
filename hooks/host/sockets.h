// The connections of all lanes of a host: who sends, who reads, who waits.
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
  // The caller closes it from now on.
  int release() { return std::exchange(number_, -1); }

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

  // `messages`: by rank, in the memory of `receive` and `send`; this rank's own, and those of ranks
  // that the lane leaves out, are not moved.
  Pending post(size_t lane, at::Tensor receive, at::Tensor send,
               const std::vector<Messages>& messages);

  // Whether the lane connects this rank with `other`.
  bool connects(size_t lane, uint32_t other) const {
    return lanes_[lane].connections[other].exists();
  }
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

}  // namespace gradferry
