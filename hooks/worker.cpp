#include "worker.h"

#include <pthread.h>
#include <unistd.h>

#include <thread>
#include <vector>

namespace gradferry {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Worker>> workers;
  int process_id = 0;
};

// Never destroyed: workers may outlive static destruction.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

}  // namespace

std::shared_ptr<Worker> Worker::start(const char* name) {
  const auto worker = std::make_shared<Worker>();
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    // A forked child has none of its parent's threads.
    if (all.process_id != getpid()) all.workers.clear();
    all.process_id = getpid();
    std::erase_if(all.workers, [](const auto& weak) { return weak.expired(); });
    all.workers.push_back(worker);
  }
  std::thread([worker, name] {
    pthread_setname_np(pthread_self(), name);
    worker->work();
  }).detach();
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
    job = nullptr;  // what it holds may be freed here
    lock.lock();
  }
  ended_ = true;
  changed_.notify_all();
}

void Worker::stop_all(std::chrono::milliseconds timeout) {
  std::vector<std::shared_ptr<Worker>> workers;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    if (all.process_id != getpid()) return;
    for (const auto& weak : all.workers) {
      if (auto worker = weak.lock()) workers.push_back(std::move(worker));
    }
  }
  for (const auto& worker : workers) worker->stop(nullptr);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (const auto& worker : workers) {
    std::unique_lock lock(worker->mutex_);
    worker->changed_.wait_until(lock, deadline, [&] { return worker->ended_; });
  }
}

}  // namespace gradferry
