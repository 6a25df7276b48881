// Threads, waiting and time: what engines know of any of them. The simulated world
// (tests/faults/sim) has its own threads.cpp, in which one thread plays all of them, so that a seed
// decides what comes first, and time is a number. Only sockets and the times of events.h do
// without.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <new>

namespace gradferry {

using TimePoint = std::chrono::steady_clock::time_point;

TimePoint now();
void sleep_for(std::chrono::milliseconds duration);

// What `action` returns, as soon as there is memory for it. A failure must be told to the others,
// also if it is that there was none.
template <typename Action>
auto with_memory(const Action& action) {
  while (true) {
    try {
      return action();
    } catch (const std::bad_alloc&) {
      sleep_for(std::chrono::milliseconds(1));
    }
  }
}

// Runs `body` on a detached thread of this name, of 15 characters at most. Throws std::system_error
// when the process cannot start another thread.
void start_thread(const char* name, std::function<void()> body);

// A condition variable. Whoever waits holds no other mutex.
class Signal {
 public:
  void notify_all();
  // May return without a notification.
  void wait(std::unique_lock<std::mutex>& lock);
  // Likewise, at `deadline` at the latest.
  void wait_until(std::unique_lock<std::mutex>& lock, TimePoint deadline);

  template <typename Predicate>
  void wait(std::unique_lock<std::mutex>& lock, Predicate holds) {
    while (!holds()) wait(lock);
  }
  // Returns whether the predicate holds.
  template <typename Predicate>
  bool wait_until(std::unique_lock<std::mutex>& lock, TimePoint deadline, Predicate holds) {
    while (!holds()) {
      if (now() >= deadline) return false;
      wait_until(lock, deadline);
    }
    return true;
  }

 private:
  std::condition_variable changed_;
};

}  // namespace gradferry
