#include "tests/kernels/simt/machine.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/kernels/simt/block_memory.h"
#include "tests/kernels/simt/fiber.h"
#include "tests/kernels/simt/simt.h"

simt::Index threadIdx, blockIdx, blockDim, gridDim;

namespace simt {
namespace {

constexpr size_t kStackBytes = 256 * 1024;  // sanitizers make frames several times larger
constexpr size_t kMostValueBytes = 16;      // of meet_in_block
// Blocks take turns on two sets of stacks and of shared memory, where ThreadSanitizer must not take
// one for ordered behind the one before it. One is enough where nobody looks for that, and
// AddressSanitizer knows the bounds of the static memory itself.
#if defined(SIMT_TSAN)
constexpr bool kTwoSets = true;
#else
constexpr bool kTwoSets = false;
#endif

struct Fiber {
  void* stack_pointer = nullptr;
  std::byte* stack = nullptr;
  SanitizedStack sanitized;
};

struct Thread {
  Fiber fiber;
  bool done = false;
  const char* waits_for = nullptr;  // null: ready, or running
  Where where;
  uint64_t value = 0, result = 0;  // of meet()
  uint32_t source = 0;
  bool fenced = false;          // since the block began
  void* last_atomic = nullptr;  // the number of its last atomic operation
};

// Lanes of a warp that wait for each other.
struct Meeting {
  uint32_t mask = 0, arrived = 0;  // mask 0: free
  WarpOp op = WarpOp::kSync;
  Where where;
  uint64_t number = 0;
};

// Threads of a block that wait for each other.
struct Gathering {
  uint32_t arrived = 0;
  Where where;
  BarrierOp op = BarrierOp::kSync;
  const void* storage = nullptr;  // of meet_in_block
};

const char* name_of(WarpOp op) {
  constexpr const char* kNames[] = {"__syncwarp",        "a shuffle",         "__ballot_sync",
                                    "__all_sync",        "__any_sync",        "__reduce_add_sync",
                                    "__reduce_max_sync", "__reduce_min_sync", "__reduce_or_sync"};
  return kNames[static_cast<size_t>(op)];
}

bool same_place(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         std::strcmp(a.file_name(), b.file_name()) == 0;
}
std::string text_of(const Where& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line());
}

// memcpy is a function that ThreadSanitizer watches.
void copy_unseen(void* to, const void* from, size_t num_bytes) {
  auto* out = static_cast<volatile unsigned char*>(to);
  const auto* in = static_cast<const volatile unsigned char*>(from);
  for (size_t i = 0; i < num_bytes; ++i) out[i] = in[i];
}

class Machine {
 public:
  uint64_t seed = 1;
  uint64_t num_launches = 0;

  void run(const char* kernel, uint32_t num_blocks, uint32_t num_threads, void (*body)(void*),
           void* context) {
    if (num_threads == 0 || num_threads > kMostThreads) throw Fault("threads per block: 1 to 1024");
    ++num_launches;
    kernel_ = kernel;
    body_ = body;
    context_ = context;
    num_threads_ = num_threads;
    random_ = seed * 0x9e3779b97f4a7c15u + 1;
    make_threads();
    blockDim.x = num_threads;
    gridDim.x = num_blocks;
    // Blocks in an order of the seed, too: first + i * step, the step coprime to their number.
    uint32_t step = num_blocks < 2 ? 1 : 1 + draw(num_blocks - 1);
    while (common_divisor(step, num_blocks) != 1) ++step;
    const uint32_t first = num_blocks == 0 ? 0 : draw(num_blocks);
    synchronize_release(&begin_address_);
    for (uint32_t i = 0; i < num_blocks; ++i) {
      blockIdx.x = static_cast<uint32_t>((first + uint64_t{i} * step) % num_blocks);
      run_block();
    }
    for (uint64_t& end : end_address_) synchronize_acquire(&end);
  }

  // Two steps: what is alive on a thread's stack when it gives up is never destroyed.
  void report(const std::string& message) {
    error_ = std::string(kernel_) + ", block " + std::to_string(blockIdx.x) + ": " + message;
  }
  [[noreturn]] void give_up() {
    switch_to(kHost);
    __builtin_unreachable();
  }

  int barrier(BarrierOp op, int predicate, const Where& where) {
    const uint64_t number = num_barriers_;
    gather("a barrier", {0, where, op, nullptr});
    count_ += predicate != 0 ? 1 : 0;
    release(&sync_address_[number % 2], gathering_.arrived == 1);
    if (gathering_.arrived == num_threads_) {
      const int results[] = {0, count_ > 0, static_cast<uint32_t>(count_) == num_threads_, count_};
      barrier_result_ = results[static_cast<size_t>(op)];
      count_ = 0;
      ++num_barriers_;
      release_block();
    }
    wait();
    synchronize_acquire(&sync_address_[number % 2]);
    return barrier_result_;
  }

  void meet_in_block(const void* storage, size_t storage_bytes, Combine combine, const void* value,
                     void* result, size_t num_bytes, const Where& where) {
    if (num_bytes > kMostValueBytes) {
      report("a block-wide value of more than 16 bytes");
      give_up();
    }
    if (gathering_.arrived == 0) check_storage(storage, storage_bytes, where);
    gather("a block-wide operation", {0, where, BarrierOp::kSync, storage});
    copy_unseen(&values_[current_ * kMostValueBytes], value, num_bytes);
    if (gathering_.arrived == num_threads_) {
      combine(values_, results_, kMostValueBytes, num_threads_);
      release_block();
    }
    // A thread may arrive at the next operation before another one has left this one, but cannot
    // complete it: results stay until all have taken theirs.
    wait();
    copy_unseen(result, &results_[current_ * kMostValueBytes], num_bytes);
  }

  uint64_t meet(WarpOp op, uint32_t mask, uint64_t value, uint32_t source, const Where& where) {
    const uint32_t lane = current_ % kWarpSize, first = current_ - lane;
    Thread& me = threads_[current_];
    if ((mask >> lane & 1) == 0) {
      report(text_of(where) + ": lane " + std::to_string(lane) + " is not in the mask of its " +
             name_of(op));
      give_up();
    }
    Meeting& meeting = find_meeting(first / kWarpSize, op, mask, where);
    const uint64_t number = meeting.number;
    me.value = value;
    me.source = source;
    const bool is_first = meeting.arrived == 0;
    meeting.arrived |= 1u << lane;
    me.waits_for = name_of(op);
    me.where = where;
    if (op == WarpOp::kSync) release(&warp_sync_address_[number % kSyncAddresses], is_first);
    if (meeting.arrived == mask) {
      combine_lanes(meeting, first);
      meeting.mask = 0;
      for (uint32_t l = 0; l < kWarpSize; ++l) {
        if ((mask >> l & 1) != 0) make_ready(first + l);
      }
    }
    wait();
    if (op == WarpOp::kSync) synchronize_acquire(&warp_sync_address_[number % kSyncAddresses]);
    return me.result;
  }

  void* enter_shared_memory(void* memory, size_t num_bytes, const Where& where) {
    const char* error = nullptr;
    void* piece = memory_.enter(memory, num_bytes, static_cast<uint8_t>(0x5a ^ seed), &error);
    if (piece == nullptr) {
      report(text_of(where) + ": " + error);
      give_up();
    }
    return piece;
  }

  void fence() {
    Thread& me = threads_[current_];
    me.fenced = true;
    if (me.last_atomic != nullptr) synchronize_acquire(me.last_atomic);
  }
  void note_atomic(void* address) {
    Thread& me = threads_[current_];
    if (me.fenced) synchronize_release(address);
    me.last_atomic = address;
  }

 private:
  static constexpr uint32_t kHost = kMostThreads;
  static constexpr uint32_t kSyncAddresses = 4096;

  static void thread_main();

  // By one of those who meet. What met there before is none of their business.
  static void release(void* address, bool is_first) {
    if (is_first) {
      synchronize_anew(address);
    } else {
      synchronize_release(address);
    }
  }

  uint32_t draw(uint32_t limit) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return static_cast<uint32_t>((random_ >> 32) * limit >> 32);
  }
  static uint32_t common_divisor(uint32_t a, uint32_t b) {
    while (b != 0) {
      const uint32_t rest = a % b;
      a = b;
      b = rest;
    }
    return a;
  }

  void make_threads() {
    if (threads_.empty()) {
      threads_.resize(kMostThreads + 1);
      other_set_.resize(kTwoSets ? kMostThreads : 0);
      memory_.reserve(kTwoSets);
    }
    threads_[kHost].fiber.sanitized.renew(true);
    for (uint32_t i = 0; i < num_threads_; ++i) {
      make_fiber(threads_[i].fiber);
      if (kTwoSets) make_fiber(other_set_[i]);
    }
    abandoned_ = false;
  }

  void make_fiber(Fiber& fiber) const {
    if (fiber.stack == nullptr) {
      fiber.stack = map_memory(kStackBytes);
      fiber.sanitized = SanitizedStack(fiber.stack, kStackBytes);
    } else if (!abandoned_) {
      return;
    }
    fiber.sanitized.renew(false);
  }

  void run_block() {
    num_ready_ = num_done_ = 0;
    gathering_.arrived = 0;
    count_ = 0;
    for (auto& warp : meetings_) {
      for (Meeting& meeting : warp) meeting.mask = 0;
    }
    ++num_blocks_;
    memory_.begin_block(kTwoSets ? num_blocks_ % 2 : 0);
    for (uint32_t i = 0; i < num_threads_; ++i) {
      if (kTwoSets) std::swap(threads_[i].fiber, other_set_[i]);
      threads_[i].done = threads_[i].fenced = false;
      threads_[i].last_atomic = nullptr;
      Fiber& fiber = threads_[i].fiber;
      fiber.sanitized.begin_again(fiber.stack_pointer);
      fiber.stack_pointer = prepare_stack(fiber.stack + kStackBytes, &thread_main);
      make_ready(i);
    }
    current_ = kHost;
    resume_one();
    if (!error_.empty()) {
      abandoned_ = true;
      const Fault fault(error_);
      error_.clear();
      throw fault;
    }
  }

  void make_ready(uint32_t thread) {
    threads_[thread].waits_for = nullptr;
    ready_[num_ready_++] = static_cast<uint16_t>(thread);
  }
  void release_block() {
    gathering_.arrived = 0;
    for (uint32_t i = 0; i < num_threads_; ++i) make_ready(i);
  }
  void wait() { resume_one(); }

  // Continues with one of the ready threads, which may be the running one, or with the host.
  void resume_one() {
    if (num_ready_ == 0) {
      if (num_done_ != num_threads_ && error_.empty()) describe_deadlock();
      switch_to(kHost);
      return;
    }
    const uint32_t chosen = draw(num_ready_);
    const uint32_t next = ready_[chosen];
    ready_[chosen] = ready_[--num_ready_];
    switch_to(next);
  }

  void switch_to(uint32_t next) {
    if (next == current_) return;
    Fiber& from = threads_[current_].fiber;
    Fiber& to = threads_[next].fiber;
    previous_ = current_;
    current_ = next;
    threadIdx.x = next;
    from.sanitized.before_switch(to.sanitized);
    gradferry_simt_switch(&from.stack_pointer, to.stack_pointer);
    from.sanitized.after_switch(threads_[previous_].fiber.sanitized);
  }

  void describe_deadlock() {
    std::string text;
    const Thread *waiting = nullptr, *other = nullptr;
    uint32_t returned = kMostThreads;
    for (uint32_t i = 0; i < num_threads_; ++i) {
      const Thread& thread = threads_[i];
      if (thread.done) {
        returned = i;
      } else if (waiting == nullptr) {
        waiting = &thread;
      } else if (!same_place(waiting->where, thread.where)) {
        other = &thread;
      }
    }
    const auto describe = [&](const Thread& thread) {
      return "thread " + std::to_string(&thread - threads_.data()) + " waits at " +
             thread.waits_for + " in " + text_of(thread.where);
    };
    text = describe(*waiting);
    if (other != nullptr) text += ", " + describe(*other);
    if (returned != kMostThreads) text += ", thread " + std::to_string(returned) + " has returned";
    report(text);
  }

  void gather(const char* what, const Gathering& call) {
    if (gathering_.arrived == 0) {
      gathering_ = call;
    } else if (!same_place(gathering_.where, call.where) || gathering_.op != call.op ||
               gathering_.storage != call.storage) {
      report("threads of the block wait for each other at " + text_of(gathering_.where) +
             " and at " + text_of(call.where));
      give_up();
    }
    ++gathering_.arrived;
    threads_[current_].waits_for = what;
    threads_[current_].where = call.where;
  }

  void check_storage(const void* storage, size_t storage_bytes, const Where& where) {
    if (memory_.use_storage(storage, storage_bytes, num_barriers_)) return;
    report(text_of(where) + ": TempStorage is used again without a barrier in between");
    give_up();
  }

  Meeting& find_meeting(uint32_t warp, WarpOp op, uint32_t mask, const Where& where) {
    // Lanes that meet elsewhere, or under another mask, may be late for this; if they never come,
    // that shows when nobody can go on.
    Meeting* free = nullptr;
    for (Meeting& meeting : meetings_[warp]) {
      if (meeting.mask == 0) {
        free = &meeting;
      } else if (meeting.mask == mask && meeting.op == op && same_place(meeting.where, where)) {
        return meeting;
      }
    }
    *free = {mask, 0, op, where, num_meetings_++};
    return *free;
  }

  void combine_lanes(const Meeting& meeting, uint32_t first) {
    uint64_t all = meeting.op == WarpOp::kMinimum ? ~uint64_t{0} : 0;
    bool every = true;
    for (uint32_t l = 0; l < kWarpSize; ++l) {
      if ((meeting.mask >> l & 1) == 0) continue;
      const uint64_t value = threads_[first + l].value;
      every &= value != 0;
      switch (meeting.op) {
        case WarpOp::kBallot: all |= uint64_t{value != 0} << l; break;
        case WarpOp::kAdd: all = static_cast<uint32_t>(all + value); break;
        case WarpOp::kMaximum: all = value > all ? value : all; break;
        case WarpOp::kMinimum: all = value < all ? value : all; break;
        default: all |= value;
      }
    }
    if (meeting.op == WarpOp::kAny) all = all != 0;
    if (meeting.op == WarpOp::kAll) all = every;
    for (uint32_t l = 0; l < kWarpSize; ++l) {
      if ((meeting.mask >> l & 1) == 0) continue;
      Thread& thread = threads_[first + l];
      thread.result = all;
      if (meeting.op != WarpOp::kShuffle) continue;
      if (thread.source >= kWarpSize || (meeting.mask >> thread.source & 1) == 0) {
        report(text_of(meeting.where) + ": lane " + std::to_string(l) + " takes from lane " +
               std::to_string(thread.source) + ", which is not in the mask");
        give_up();
      }
      thread.result = threads_[first + thread.source].value;
    }
  }

  const char* kernel_ = "";
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
  uint64_t random_ = 1;
  uint32_t num_threads_ = 0, num_ready_ = 0, num_done_ = 0;
  uint32_t current_ = kHost, previous_ = kHost;
  uint16_t ready_[2 * kMostThreads];
  std::vector<Thread> threads_;
  std::vector<Fiber> other_set_;
  uint32_t num_blocks_ = 0;  // so far
  bool abandoned_ = false;
  std::string error_;

  Gathering gathering_;
  int count_ = 0, barrier_result_ = 0;
  uint64_t num_barriers_ = 0, num_meetings_ = 0;
  Meeting meetings_[kMostThreads / kWarpSize][kWarpSize];
  alignas(16) std::byte values_[kMostThreads * kMostValueBytes];
  alignas(16) std::byte results_[kMostThreads * kMostValueBytes];
  BlockMemory memory_;

  // What ThreadSanitizer knows the synchronization by. Neighbouring barriers have different
  // addresses, since a thread may reach the next one before another has left this one; so have
  // beginning and end, since a thread may return before another begins. A block knows of the
  // launch's beginning and of the blocks before it on the same set: every second end is that set's.
  uint64_t sync_address_[2], begin_address_, end_address_[4], warp_sync_address_[kSyncAddresses];
};

Machine& the_machine() {
  static Machine machine;
  return machine;
}

void Machine::thread_main() {
  Machine& m = the_machine();
  m.threads_[m.current_].fiber.sanitized.enter(m.threads_[m.previous_].fiber.sanitized);
  synchronize_acquire(&m.begin_address_);
  synchronize_acquire(&m.end_address_[(m.num_blocks_ + 2) % 4]);
  m.body_(m.context_);
  synchronize_release(&m.end_address_[m.num_blocks_ % 4]);
  m.threads_[m.current_].done = true;
  ++m.num_done_;
  m.resume_one();
  __builtin_unreachable();
}

}  // namespace

void set_seed(uint64_t seed) { the_machine().seed = seed; }
void run(const char* kernel, uint32_t num_blocks, uint32_t num_threads, void (*body)(void*),
         void* context) {
  the_machine().run(kernel, num_blocks, num_threads, body, context);
}
uint64_t num_launches() { return the_machine().num_launches; }
void fail(const char* message, const Where& where) {
  the_machine().report(text_of(where) + ": " + message);
  the_machine().give_up();
}
int barrier(BarrierOp op, int predicate, const Where& where) {
  return the_machine().barrier(op, predicate, where);
}
uint64_t meet(WarpOp op, uint32_t mask, uint64_t value, uint32_t source, const Where& where) {
  return the_machine().meet(op, mask, value, source, where);
}
void meet_in_block(const void* storage, size_t storage_bytes, Combine combine, const void* value,
                   void* result, size_t num_bytes, const Where& where) {
  the_machine().meet_in_block(storage, storage_bytes, combine, value, result, num_bytes, where);
}
void* enter_shared_memory(void* memory, size_t num_bytes, const Where& where) {
  return the_machine().enter_shared_memory(memory, num_bytes, where);
}
void fence() { the_machine().fence(); }
void note_atomic(void* address) { the_machine().note_atomic(address); }

}  // namespace simt
