// A thread that runs jobs in order. It ends when it was asked to stop and no job is left. It may
// outlive the object that added jobs, because a job may wait for a peer that never answers.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "background_thread.h"
#include "threads.h"

namespace gradferry {

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
