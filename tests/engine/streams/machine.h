// A device that is no device: streams and events of a GPU, run by one thread of this process, with
// host memory as device memory. What it is for:
//
// * Order. Streams run in an order drawn from a seed, as late as they may, so that whoever forgets
//   to wait for an event sees old or poisoned bytes.
// * Proof. Every operation says what it reads and writes. Two that touch the same byte, one of them
//   writing, must be ordered by streams, events or the host; if they are not it is a race, whatever
//   order they ran in. (Vector clocks: one per stream, and one for what each host thread knows. A
//   thread learns by waiting, and from a thread whose event it uses.)
// * Death. Memory that was freed stays poisoned for a while, and whoever touches it is reported.
// * Counts. How often the host allocated or waited.
// * A clock. With prices, operations take simulated time: one begins when what it waits for has
//   ended, and not before the host enqueued it. The host's time is that of what it last waited for.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace fake_device {

inline constexpr size_t kMostStreams = 32;
using Clock = std::array<uint64_t, kMostStreams>;

class Machine;

// What an operation touches; handed to it while it runs.
class Touched {
 public:
  void read(const void* memory, size_t num_bytes) const;
  void write(const void* memory, size_t num_bytes) const;

  // Simulated seconds: when the operation began, and that it ends no earlier than `end`.
  double begin() const;
  void last_until(double end) const;

 private:
  friend class Machine;
  Machine* machine_;
  const char* name_;
  uint32_t stream_;
  uint64_t time_;  // on its stream
  const Clock* clock_;
};
using Work = std::function<void(const Touched&)>;

// A place in a stream: what an event records.
struct Mark {
  Clock clock;
  Clock host;  // what the thread that recorded it knew
  bool reached = false;
  double time = 0;  // simulated
};
using MarkPtr = std::shared_ptr<Mark>;

struct Counters {
  uint64_t allocations = 0;
  uint64_t held_bytes = 0;
  uint64_t host_waits = 0;
  uint64_t waits = 0;      // of streams and of the host, but those of copies and of tests
  uint64_t held_back = 0;  // other streams that freed memory has waited for
  uint64_t launches = 0;   // of kernels, counted when they run
};

// What operations take, in simulated seconds.
struct Prices {
  double launch = 0;      // of a kernel
  double byte = 0;        // that a kernel reads or writes
  double collective = 0;  // of a collective
  double byte_sent = 0;   // that a collective sends to other ranks
};

class Machine {
 public:
  static Machine& get();

  uint32_t new_stream();
  // One for a while: that of somebody who has given it back, or a new one.
  uint32_t borrow_stream();
  void give_back(uint32_t stream);
  // `name` is a literal. `is_kernel`: it takes the time of one. `is_ready`: until it says so, the
  // stream waits, and others go on.
  void enqueue(uint32_t stream, const char* name, Work work, bool is_kernel = true,
               std::function<bool()> is_ready = nullptr);
  MarkPtr record(uint32_t stream);
  // `counted`: it is one that omit_wait() counts.
  void wait(uint32_t stream, const MarkPtr& mark, bool counted = true);
  bool query(const MarkPtr& mark);
  // The host waits.
  void synchronize(const MarkPtr& mark, bool counted = true);
  void synchronize(uint32_t stream, bool counted = true) { synchronize(record(stream), counted); }
  void finish();  // synchronizes all streams, not counted
  // Counts a wait that the host is about to make by itself; whether it is the one to omit.
  bool omits_wait();

  // Gives host memory of malloc() back when what is enqueued by now has run. `memory` may be null.
  void free_on_host(void* memory, size_t num_bytes);
  void* allocate(size_t num_bytes, uint32_t stream);
  void use_on(const void* memory, uint32_t stream);
  void free(void* memory);

  // For tests.
  void set_seed(uint64_t seed);
  void set_prices(const Prices& prices);
  Prices prices();
  // The one of this number from now on; -1: none. Who waits learns nothing by it, so that what it
  // orders is a race; but what happens is the same, and more steps can follow.
  void omit_wait(int64_t number);
  void count_launches(uint64_t number);
  Counters counters();
  std::vector<std::string> races();  // since the last call
  void note_error(const std::string& error);

 private:
  struct Operation {
    const char* name;
    Clock clock;
    Work work;     // null: wait for `mark`
    MarkPtr mark;  // or reach it
    bool reaches = false;
    bool is_kernel = false;
    double earliest = 0;  // when the host enqueued it
    std::function<bool()> is_ready = nullptr;
  };
  struct Touch {
    const char* name = nullptr;
    uint32_t stream = 0;
    uint64_t time = 0;
  };
  struct Cell {
    Touch write;
    std::vector<Touch> reads;
  };
  struct Block {
    size_t num_bytes;
    uint32_t stream;
    std::set<uint32_t> used_on;
  };
  friend class Touched;

  Machine();
  void work();
  std::optional<uint32_t> choose(bool& looks_again);
  MarkPtr record_locked(uint32_t stream);
  void push(uint32_t stream, Operation operation);
  void run(Operation& operation, uint32_t stream, std::unique_lock<std::mutex>& lock);
  void know(const MarkPtr& mark);
  bool count_wait();
  void touch(const Touched& by, uintptr_t begin, uintptr_t end, bool write);
  void split(uintptr_t address);
  void compare(const Touched& by, const Touch& other);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Operation>> queues_;
  std::vector<uint32_t> given_back_;
  std::vector<Clock> clocks_;
  std::vector<uint64_t> priorities_;
  Prices prices_;
  std::vector<double> ends_;  // by stream: of its last operation that ran
  double host_time_ = 0;
  uint64_t waiting_ = 0;  // host threads
  bool host_is_busy_ = false;
  std::mt19937_64 random_;
  std::map<void*, Block> blocks_;
  int64_t omitted_ = -1;
  Counters counters_;

  void forget_touches(const void* memory, size_t num_bytes);
  void bury(void* memory, size_t num_bytes);
  void expect_alive(const Touched& by, uintptr_t begin, uintptr_t end);

  // The worker's alone, from here on.
  double begin_ = 0, end_ = 0;  // of the operation that runs
  uint64_t touched_bytes_ = 0;
  std::map<uintptr_t, Cell> cells_;     // from this address to the next one's
  std::map<uintptr_t, size_t> buried_;  // poisoned, and not yet given back to the process
  std::deque<void*> burials_;
  size_t buried_bytes_ = 0;
  std::vector<std::string> races_;
};

}  // namespace fake_device
