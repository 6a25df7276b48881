// A detached thread. It may wait for a peer that never answers, so nothing joins it. The process
// keeps a list of all such threads that have not ended, so that it can ask them to stop at exit.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "threads.h"

namespace gradferry {

// Set when gradferry is shut down at exit. After that no thread may take the GIL, and what our
// threads still hold is not freed.
inline std::atomic<bool> process_is_ending{false};

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

// A thread that runs jobs in order. It ends when it was asked to stop and no job is left. It may
// outlive the object that added jobs, because a job may wait for a peer that never answers.
class Worker {
 public:
  // Throws as BackgroundThread::start().
  static std::shared_ptr<Worker> start(const char* name, BackgroundThread::Role role);

  // Returns false, and drops the job, when the thread was asked to stop. Jobs must not throw.
  bool add(std::function<void()> job);
  // Asks the thread to stop; it runs `last` after all jobs.
  void stop(std::function<void()> last);

 private:
  void work();

  std::mutex mutex_;
  Signal changed_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
};

}  // namespace gradferry
