#include "background_thread.h"

#include <unistd.h>

#include <utility>
#include <vector>

namespace gradferry {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<BackgroundThread>> threads;
  int process_id = 0;
};

// Never destroyed: threads may outlive static destruction.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

void BackgroundThread::start(const char* name, Role role, std::function<void()> body,
                             std::function<void()> stop) {
  const std::shared_ptr<BackgroundThread> self(new BackgroundThread(role, std::move(stop)));
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    // A forked child has none of its parent's threads.
    if (all.process_id != getpid()) all.threads.clear();
    all.process_id = getpid();
    std::erase_if(all.threads, [](const auto& weak) { return weak.expired(); });
    all.threads.push_back(self);
  }
  start_thread(name, [self, body = std::move(body)]() mutable {
    body();
    body = nullptr;  // frees what it holds before the thread counts as ended
    const std::lock_guard lock(self->mutex_);
    self->ended_ = true;
    self->changed_.notify_all();
  });
}

void BackgroundThread::stop_all(std::chrono::milliseconds timeout) {
  std::vector<std::shared_ptr<BackgroundThread>> threads;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    if (all.process_id != getpid()) return;
    for (const auto& weak : all.threads) {
      if (auto thread = weak.lock()) threads.push_back(std::move(thread));
    }
  }
  const auto deadline = now() + timeout;
  for (const Role role : {Role::kEngine, Role::kHelper}) {
    for (const auto& thread : threads) {
      if (thread->role_ == role) thread->stop_();
    }
    for (const auto& thread : threads) {
      if (thread->role_ != role) continue;
      std::unique_lock lock(thread->mutex_);
      thread->changed_.wait_until(lock, deadline, [&] { return thread->ended_; });
    }
  }
}

// --- Worker ---

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
