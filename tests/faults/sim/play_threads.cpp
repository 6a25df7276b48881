// play() with threads and sockets as they are: in gradferry_threads it stands in for play.cpp, for
// ThreadSanitizer to look on. A world's fault does not befall it, only the difference of a rank.
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "hooks/host/sockets.h"
#include "tests/faults/sim/play.h"
#include "tests/faults/sim/rank.h"

namespace gradferry::sim {
namespace {

// A busy machine makes ranks wait for each other; only who waits for what never comes may fail.
constexpr std::chrono::seconds kLaneTimeout{60};
// Watchers leave the processors to the ranks.
constexpr std::chrono::milliseconds kBetweenQuestions{1};
// A play that takes longer ends the process.
constexpr unsigned kMostSeconds = 180;

class ThreadedHost final : public Host {
 public:
  using Host::Host;
  ~ThreadedHost() override { join(); }

  std::vector<std::shared_ptr<Lane>> lanes(
      uint32_t rank, const std::vector<std::vector<uint32_t>>& ranks) override {
    std::vector<LaneSockets> sockets;
    for (uint32_t index = 0; index < ranks.size(); ++index) {
      if (ranks[index].empty()) continue;
      LaneSockets& lane = sockets.emplace_back(LaneSockets{ranks[index], {}});
      lane.connections.resize(world.size);
      for (const uint32_t other : ranks[index]) {
        if (other != rank) lane.connections[other] = take_end(index, rank, other);
      }
    }
    const auto made = make_socket_lanes(rank, std::move(sockets), kLaneTimeout);
    std::vector<std::shared_ptr<Lane>> by_index(ranks.size());
    auto next = made.begin();
    for (uint32_t index = 0; index < ranks.size(); ++index) {
      if (!ranks[index].empty()) by_index[index] = *next++;
    }
    return by_index;
  }

  std::optional<uint64_t> sent_bytes(uint32_t /*rank*/) const override { return std::nullopt; }

  // Asks all that any thread may ask, for as long as the rank has its engine.
  void watch(const std::shared_ptr<HostEngine>& engine) override {
    const std::lock_guard lock(mutex_);
    watchers_.emplace_back([weak = std::weak_ptr(engine)] {
      while (const auto alive = weak.lock()) {
        alive->stats();
        alive->events();
        alive->current_step();
        try {
          alive->expect_alive();
          sleep_for(kBetweenQuestions);
        } catch (const Error&) {
          sleep_for(kBetweenQuestions);  // it goes on answering
        }
      }
    });
  }

  void join() {
    for (std::thread& watcher : watchers_) watcher.join();
    watchers_.clear();
  }

 private:
  // This rank's end of the connection with another; the first of the two makes it.
  Descriptor take_end(uint32_t lane, uint32_t rank, uint32_t other) {
    const std::lock_guard lock(mutex_);
    const auto made = ends_.find({lane, rank, other});
    if (made != ends_.end()) {
      Descriptor end = std::move(made->second);
      ends_.erase(made);
      return end;
    }
    int both[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, both) != 0) {
      throw std::system_error(errno, std::generic_category(), "socketpair");
    }
    ends_.emplace(std::tuple(lane, other, rank), Descriptor(both[1]));
    return Descriptor(both[0]);
  }

  std::mutex mutex_;
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, Descriptor> ends_;  // lane, rank, other
  std::vector<std::thread> watchers_;
};

}  // namespace

Seen play(const World& world, const Playing& playing) {
  alarm(kMostSeconds);
  ThreadedHost host(world, playing);
  Seen seen;
  seen.ranks.resize(world.size);
  std::vector<std::exception_ptr> failures(world.size);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < world.size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Rank(host, rank, seen.ranks[rank]).run();
      } catch (...) {
        failures[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  host.join();
  alarm(0);
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return seen;
}

}  // namespace gradferry::sim
