// A thread that does jobs in order. It ends when it was told to stop and nothing is left, and may
// outlive whoever gave it jobs: a job may wait for a peer that never answers.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "background_thread.h"

namespace gradferry {

class Worker {
 public:
  // Throws as BackgroundThread::start().
  static std::shared_ptr<Worker> start(const char* name, BackgroundThread::Role role);

  // False when the thread was told to stop. Jobs must not throw.
  bool add(std::function<void()> job);
  // `last` is the thread's last act, after all jobs.
  void stop(std::function<void()> last);

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stop_ = false;
};

}  // namespace gradferry
