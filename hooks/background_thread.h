// A detached thread. It may wait for a peer that never answers, so nothing joins it. The process
// keeps a list of all such threads that have not ended, so that it can ask them to stop at exit.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "threads.h"

namespace gradferry {

class BackgroundThread {
 public:
  // A helper does what engines give it, also while these end.
  enum class Role { kEngine, kHelper };

  // The thread runs `body` and ends. `stop` asks it to end; any thread may call it, at any time and
  // more than once. Both live until the thread has ended. Throws std::system_error when the process
  // cannot start another thread.
  static void start(const char* name, Role role, std::function<void()> body,
                    std::function<void()> stop);

  // Asks every thread in the list to stop, helpers after engines, and waits at most `timeout` in
  // all until they have ended.
  static void stop_all(std::chrono::milliseconds timeout);

 private:
  BackgroundThread(Role role, std::function<void()> stop) : role_(role), stop_(std::move(stop)) {}

  const Role role_;
  const std::function<void()> stop_;

  std::mutex mutex_;
  Signal changed_;
  bool ended_ = false;
};

}  // namespace gradferry
