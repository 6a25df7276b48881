#include "worker.h"

#include <utility>

namespace gradferry {

std::shared_ptr<Worker> Worker::start(const char* name, BackgroundThread::Role role) {
  const auto worker = std::make_shared<Worker>();
  BackgroundThread::start(
      name, role, [worker] { worker->work(); },
      [weak = std::weak_ptr(worker)] {
        if (const auto alive = weak.lock()) alive->stop(nullptr);
      });
  return worker;
}

bool Worker::add(std::function<void()> job) {
  const std::lock_guard lock(mutex_);
  if (stop_) return false;
  jobs_.push_back(std::move(job));
  changed_.notify_all();
  return true;
}

void Worker::stop(std::function<void()> last) {
  const std::lock_guard lock(mutex_);
  if (last) jobs_.push_back(std::move(last));
  stop_ = true;
  changed_.notify_all();
}

void Worker::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) break;
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // frees what it holds while the mutex is not locked
    lock.lock();
  }
}

}  // namespace gradferry
