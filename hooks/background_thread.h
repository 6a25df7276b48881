// A thread of ours. It is detached, since it may wait for a peer that never answers, and known to
// the process until it has ended, so that the end of the process can ask all of them to stop.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace gradferry {

class BackgroundThread {
 public:
  // A helper does what engines give it, also while these end.
  enum class Role { kEngine, kHelper };

  // `body` is all that the thread does. `stop` asks it to end, from any thread; it may come at any
  // time, and more than once. Both live until the thread has ended. Throws std::system_error when
  // the process has all the threads it may have.
  static void start(const char* name, Role role, std::function<void()> body,
                    std::function<void()> stop);

  // Asks every thread of this process to stop, helpers after engines; waits at most `timeout` in
  // all for what they have to do.
  static void stop_all(std::chrono::milliseconds timeout);

 private:
  BackgroundThread(Role role, std::function<void()> stop) : role_(role), stop_(std::move(stop)) {}

  const Role role_;
  const std::function<void()> stop_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
};

}  // namespace gradferry
