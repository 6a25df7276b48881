// One thread that plays all threads of all ranks, and their time. What runs next is drawn from a
// seed; time passes only when nothing can run, so waiting costs none.
//
// This is what hooks/threads.h is in a simulated world: threads are stacks of fiber.h.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "hooks/threads.h"
#include "tests/faults/sim/choices.h"
#include "tests/faults/sim/fiber.h"

namespace gradferry::sim {

// Something does not hold in a simulated world.
class Broken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What happens outside of ranks: messages that travel.
class Events {
 public:
  virtual ~Events() = default;
  // How many things can happen now.
  virtual size_t possible() const = 0;
  // Lets one of them happen.
  virtual void happen(size_t which) = 0;
  // When the next one can that cannot yet; TimePoint::max(): none.
  virtual TimePoint next() const = 0;
};

class Scheduler {
 public:
  // `seed` 0: the first that can run does, stacks before events.
  explicit Scheduler(uint64_t seed);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // The one whose run() is under way.
  static Scheduler& current();

  void set_events(Events* events) { events_ = events; }
  // A thread of `rank`.
  void start(uint32_t rank, std::string name, std::function<void()> body);
  // Runs until all threads have ended. Throws what a thread throws, and Broken when those that have
  // not wait for what never comes, or more has happened than a world takes.
  void run();

  TimePoint time() const { return time_; }
  // Of the thread that runs.
  uint32_t rank() const;
  // No thread of this rank runs any more. What it holds is never freed.
  void stop(uint32_t rank);
  bool has_stopped(uint32_t rank) const;

  // For the thread that runs.
  void wait(const void* signal, TimePoint deadline);
  void notify(const void* signal);

 private:
  struct Thread;
  static void enter();
  void resume(Thread& thread);
  void leave();
  std::string who_waits() const;

  Random random_;
  const bool in_order_;
  Events* events_ = nullptr;
  std::vector<std::unique_ptr<Thread>> threads_;  // in the order of their starts
  std::vector<Thread*> ready_;
  std::vector<uint32_t> stopped_;
  Thread* running_ = nullptr;
  std::exception_ptr failure_;  // what a thread threw
  void* main_stack_ = nullptr;
  TimePoint time_{std::chrono::hours(1)};
};

}  // namespace gradferry::sim
