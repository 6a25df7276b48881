#include "tests/faults/sim/scheduler.h"

#include <cxxabi.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace gradferry::sim {
namespace {

constexpr size_t kStackBytes = size_t{1} << 20;
// More than a world needs by far: then something turns in a circle.
constexpr uint64_t kMostTurns = 2'000'000;

Scheduler* current_scheduler = nullptr;

// Stacks for one thread after another: only the pages that were ever touched take memory.
class Stacks {
 public:
  std::byte* take() {
    if (free_.empty()) {
      void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::bad_alloc();
      return static_cast<std::byte*>(memory);
    }
    std::byte* stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void give_back(std::byte* stack) { free_.push_back(stack); }

 private:
  std::vector<std::byte*> free_;
};

Stacks& stacks() {
  static auto* all = new Stacks;
  return *all;
}

// The exceptions that a thread has caught and not left yet; the run-time library keeps them per
// thread, and here one thread is many.
struct Exceptions {
  void* caught = nullptr;
  unsigned uncaught = 0;

  void swap_with_current() {
    Exceptions other;
    void* globals = abi::__cxa_get_globals();
    std::memcpy(&other, globals, sizeof(other));
    std::memcpy(globals, this, sizeof(other));
    *this = other;
  }
};

}  // namespace

struct Scheduler::Thread {
  uint32_t rank;
  std::string name;
  std::function<void()> body;
  std::byte* stack;
  void* stack_pointer;
  Exceptions exceptions = {};
  const void* signal = nullptr;  // it waits for
  TimePoint deadline = TimePoint::max();
  bool ended = false;
};

Scheduler::Scheduler(uint64_t seed) : random_(seed), in_order_(seed == 0) {
  current_scheduler = this;
}

Scheduler::~Scheduler() {
  for (const auto& thread : threads_) stacks().give_back(thread->stack);
  current_scheduler = nullptr;
}

Scheduler& Scheduler::current() {
  if (current_scheduler == nullptr) throw std::logic_error("no world is being simulated");
  return *current_scheduler;
}

void Scheduler::start(uint32_t rank, std::string name, std::function<void()> body) {
  std::byte* stack = stacks().take();
  auto thread =
      std::make_unique<Thread>(Thread{rank, std::move(name), std::move(body), stack, nullptr});
  thread->stack_pointer = prepare_stack(stack + kStackBytes, &Scheduler::enter);
  if (!has_stopped(rank)) ready_.push_back(thread.get());
  threads_.push_back(std::move(thread));
}

// The first function on every stack.
void Scheduler::enter() {
  Scheduler& self = current();
  Thread& thread = *self.running_;
  try {
    thread.body();
  } catch (...) {
    self.failure_ = std::current_exception();
  }
  thread.body = nullptr;
  thread.ended = true;
  self.leave();
}

void Scheduler::resume(Thread& thread) {
  running_ = &thread;
  thread.exceptions.swap_with_current();
  gradferry_switch_stack(&main_stack_, thread.stack_pointer);
  thread.exceptions.swap_with_current();
  running_ = nullptr;
}

// Back to run().
void Scheduler::leave() {
  Thread& thread = *running_;
  gradferry_switch_stack(&thread.stack_pointer, main_stack_);
}

void Scheduler::run() {
  for (uint64_t turn = 0;; ++turn) {
    if (turn == kMostTurns) throw Broken("the world does not end:" + who_waits());
    const size_t events = events_ == nullptr ? 0 : events_->possible();
    const size_t choices = ready_.size() + events;
    if (choices != 0) {
      const size_t choice = in_order_ ? 0 : random_.below(choices);
      if (choice >= ready_.size()) {
        events_->happen(choice - ready_.size());
        continue;
      }
      Thread* thread = ready_[choice];
      ready_.erase(ready_.begin() + static_cast<ptrdiff_t>(choice));
      resume(*thread);
      if (failure_) std::rethrow_exception(failure_);
      if (thread->ended) {
        stacks().give_back(thread->stack);
        std::erase_if(threads_, [&](const auto& other) { return other.get() == thread; });
      }
      continue;
    }
    TimePoint next = events_ == nullptr ? TimePoint::max() : events_->next();
    bool waits = false;
    for (const auto& thread : threads_) {
      if (has_stopped(thread->rank)) continue;
      waits = true;
      next = std::min(next, thread->deadline);
    }
    if (!waits) return;
    if (next == TimePoint::max()) {
      throw Broken("ranks wait for what nobody will send:" + who_waits());
    }
    time_ = std::max(time_, next);
    for (const auto& thread : threads_) {
      if (thread->deadline > time_ || has_stopped(thread->rank)) continue;
      thread->signal = nullptr;
      thread->deadline = TimePoint::max();
      ready_.push_back(thread.get());
    }
  }
}

std::string Scheduler::who_waits() const {
  std::string text;
  for (const auto& thread : threads_) {
    if (!has_stopped(thread->rank)) {
      text += " rank " + std::to_string(thread->rank) + " in '" + thread->name + "';";
    }
  }
  return text;
}

uint32_t Scheduler::rank() const { return running_->rank; }

bool Scheduler::has_stopped(uint32_t rank) const {
  return std::ranges::find(stopped_, rank) != stopped_.end();
}

void Scheduler::stop(uint32_t rank) {
  stopped_.push_back(rank);
  std::erase_if(ready_, [&](const Thread* thread) { return thread->rank == rank; });
  if (running_ != nullptr && running_->rank == rank) leave();
}

void Scheduler::wait(const void* signal, TimePoint deadline) {
  running_->signal = signal;
  running_->deadline = deadline;
  leave();
}

void Scheduler::notify(const void* signal) {
  for (const auto& thread : threads_) {
    if (thread->signal != signal || signal == nullptr || has_stopped(thread->rank)) continue;
    thread->signal = nullptr;
    thread->deadline = TimePoint::max();
    ready_.push_back(thread.get());
  }
}

}  // namespace gradferry::sim

// --- hooks/threads.h

namespace gradferry {

using sim::Scheduler;

TimePoint now() { return Scheduler::current().time(); }

void sleep_for(std::chrono::milliseconds duration) {
  Scheduler::current().wait(nullptr, now() + duration);
}

void start_thread(const char* name, std::function<void()> body) {
  Scheduler& scheduler = Scheduler::current();
  scheduler.start(scheduler.rank(), name, std::move(body));
}

void Signal::notify_all() { Scheduler::current().notify(this); }

void Signal::wait(std::unique_lock<std::mutex>& lock) { wait_until(lock, TimePoint::max()); }

void Signal::wait_until(std::unique_lock<std::mutex>& lock, TimePoint deadline) {
  lock.unlock();
  Scheduler::current().wait(this, deadline);
  lock.lock();
}

}  // namespace gradferry
