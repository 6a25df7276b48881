#include "threads.h"

#include <pthread.h>

#include <thread>
#include <utility>

namespace gradferry {

TimePoint now() { return std::chrono::steady_clock::now(); }

void sleep_for(std::chrono::milliseconds duration) { std::this_thread::sleep_for(duration); }

void start_thread(const char* name, std::function<void()> body) {
  std::thread([name, body = std::move(body)] {
    pthread_setname_np(pthread_self(), name);
    body();
  }).detach();
}

void Signal::notify_all() { changed_.notify_all(); }

void Signal::wait(std::unique_lock<std::mutex>& lock) { changed_.wait(lock); }

void Signal::wait_until(std::unique_lock<std::mutex>& lock, TimePoint deadline) {
  changed_.wait_until(lock, deadline);
}

}  // namespace gradferry
