#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace fake_device {
namespace {

constexpr std::byte kPoison{0xa5};
// What is enqueued runs when the host waits, or at the latest when nothing happened for this long.
constexpr std::chrono::milliseconds kLatest{2};
// How often a stream that waits for other ranks is looked at.
constexpr std::chrono::microseconds kGlance{50};
constexpr size_t kAlignment = 256;
constexpr size_t kMostBuried = size_t{64} << 20;

// What this thread of the host knows. Under the lock of the one machine.
thread_local Clock host_clock{};

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

}  // namespace

void Touched::read(const void* memory, size_t num_bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  machine_->touch(*this, begin, begin + num_bytes, false);
}
void Touched::write(const void* memory, size_t num_bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  machine_->touch(*this, begin, begin + num_bytes, true);
}

double Touched::begin() const { return machine_->begin_; }
void Touched::last_until(double end) const { machine_->end_ = std::max(machine_->end_, end); }

// Never destroyed: its thread runs until the process ends.
Machine& Machine::get() {
  static auto* machine = new Machine;
  return *machine;
}

Machine::Machine() {
  new_stream();  // the default one
  std::thread([this] { work(); }).detach();
}

uint32_t Machine::new_stream() {
  const std::lock_guard lock(mutex_);
  const auto stream = static_cast<uint32_t>(queues_.size());
  if (stream == kMostStreams) throw std::runtime_error("fake device: too many streams");
  queues_.emplace_back();
  clocks_.emplace_back();
  ends_.push_back(0);
  priorities_.push_back(random_());
  return stream;
}

uint32_t Machine::borrow_stream() {
  {
    const std::lock_guard lock(mutex_);
    if (!given_back_.empty()) {
      const uint32_t stream = given_back_.back();
      given_back_.pop_back();
      return stream;
    }
  }
  return new_stream();
}

void Machine::give_back(uint32_t stream) {
  const std::lock_guard lock(mutex_);
  given_back_.push_back(stream);
}

// Under the lock. The operation comes after all that its stream and this thread know of.
void Machine::push(uint32_t stream, Operation operation) {
  Clock& clock = clocks_[stream];
  join(clock, host_clock);
  ++clock[stream];
  operation.clock = clock;
  operation.earliest = host_time_;
  host_is_busy_ = true;
  queues_[stream].push_back(std::move(operation));
  changed_.notify_all();
}

void Machine::enqueue(uint32_t stream, const char* name, Work work, bool is_kernel,
                      std::function<bool()> is_ready) {
  const std::lock_guard lock(mutex_);
  push(stream, {name, {}, std::move(work), nullptr, false, is_kernel, 0, std::move(is_ready)});
}

MarkPtr Machine::record_locked(uint32_t stream) {
  auto mark = std::make_shared<Mark>();
  push(stream, {"record", {}, nullptr, mark, true});
  mark->clock = clocks_[stream];
  mark->host = host_clock;
  return mark;
}
MarkPtr Machine::record(uint32_t stream) {
  const std::lock_guard lock(mutex_);
  return record_locked(stream);
}

void Machine::wait(uint32_t stream, const MarkPtr& mark, bool counted) {
  const std::lock_guard lock(mutex_);
  join(host_clock, mark->host);  // who has the event has come after who recorded it
  const bool learns = !(counted && count_wait());
  push(stream, {"wait", {}, nullptr, mark});
  if (learns) join(clocks_[stream], mark->clock);
}

// Under the lock. Whether the wait is the one to omit.
bool Machine::count_wait() {
  ++counters_.waits;
  if (omitted_ < 0) return false;
  return omitted_-- == 0;
}

bool Machine::omits_wait() {
  const std::lock_guard lock(mutex_);
  return count_wait();
}

// Under the lock. This thread has learnt that a mark is reached.
void Machine::know(const MarkPtr& mark) {
  join(host_clock, mark->clock);
  host_time_ = std::max(host_time_, mark->time);
}

bool Machine::query(const MarkPtr& mark) {
  const std::lock_guard lock(mutex_);
  join(host_clock, mark->host);
  if (mark->reached) know(mark);
  return mark->reached;
}

void Machine::synchronize(const MarkPtr& mark, bool counted) {
  std::unique_lock lock(mutex_);
  join(host_clock, mark->host);
  const bool learns = !(counted && count_wait());
  ++counters_.host_waits;
  ++waiting_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return mark->reached; });
  --waiting_;
  if (learns) know(mark);
}

void Machine::finish() {
  std::vector<MarkPtr> marks;
  {
    const std::lock_guard lock(mutex_);
    for (uint32_t stream = 0; stream < queues_.size(); ++stream) {
      marks.push_back(record_locked(stream));
    }
  }
  for (const MarkPtr& mark : marks) synchronize(mark, /*counted=*/false);
}

// The stream to go on with: of those that can, the one of highest priority. Priorities change at
// random, so that one stream runs far ahead of another for a while. `looks_again`: some may become
// able to without anybody saying so.
std::optional<uint32_t> Machine::choose(bool& looks_again) {
  if (random_() % 8 == 0) {
    for (uint64_t& priority : priorities_) priority = random_();
  }
  std::optional<uint32_t> chosen;
  uint64_t highest = 0;
  for (uint32_t i = 0; i < queues_.size(); ++i) {
    if (queues_[i].empty()) continue;
    const Operation& next = queues_[i].front();
    const bool blocked = !next.work && !next.reaches && !next.mark->reached;
    if (blocked || (chosen && priorities_[i] < highest)) continue;
    if (next.is_ready && !next.is_ready()) {
      looks_again = true;
      continue;
    }
    chosen = i;
    highest = priorities_[i];
  }
  return chosen;
}

void Machine::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    bool looks_again = false;
    const std::optional<uint32_t> stream = choose(looks_again);
    if (!stream) {
      if (looks_again) {
        changed_.wait_for(lock, kGlance);
      } else {
        changed_.wait(lock);
      }
      continue;
    }
    // As late as possible: not before the host waits or has nothing more to say.
    if (waiting_ == 0 && host_is_busy_) {
      host_is_busy_ = changed_.wait_for(lock, kLatest) == std::cv_status::no_timeout;
      continue;
    }
    Operation operation = std::move(queues_[*stream].front());
    queues_[*stream].pop_front();
    double& end = ends_[*stream];
    end = std::max(end, operation.earliest);
    if (operation.work) {
      run(operation, *stream, lock);
    } else if (operation.reaches) {
      operation.mark->time = end;
      operation.mark->reached = true;
      changed_.notify_all();
    } else {
      end = std::max(end, operation.mark->time);
    }
  }
}

// Without the lock while it works.
void Machine::run(Operation& operation, uint32_t stream, std::unique_lock<std::mutex>& lock) {
  Touched touched;
  touched.machine_ = this;
  touched.name_ = operation.name;
  touched.stream_ = stream;
  touched.time_ = operation.clock[stream];
  touched.clock_ = &operation.clock;
  begin_ = end_ = ends_[stream];
  touched_bytes_ = 0;
  const Prices prices = prices_;
  lock.unlock();
  try {
    operation.work(touched);
  } catch (const std::exception& error) {
    note_error(std::string(operation.name) + " failed: " + error.what());
  }
  operation.work = nullptr;
  if (operation.is_kernel) {
    end_ = begin_ + prices.launch + prices.byte * static_cast<double>(touched_bytes_);
  }
  lock.lock();
  ends_[stream] = end_;
}

// --- memory --------------------------------------------------------------------------------------

void* Machine::allocate(size_t num_bytes, uint32_t stream) {
  if (num_bytes == 0) return nullptr;
  void* memory =
      std::aligned_alloc(kAlignment, (num_bytes + kAlignment - 1) / kAlignment * kAlignment);
  const std::lock_guard lock(mutex_);
  ++counters_.allocations;
  counters_.held_bytes += num_bytes;
  blocks_[memory] = {num_bytes, stream, {}};
  push(stream, {"poison of new memory",
                {},
                [=](const Touched& touched) {
                  touched.write(memory, num_bytes);
                  std::memset(memory, static_cast<int>(kPoison), num_bytes);
                },
                nullptr});
  return memory;
}

void Machine::use_on(const void* memory, uint32_t stream) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(const_cast<void*>(memory));
  if (found == blocks_.end() || found->second.stream == stream) return;
  found->second.used_on.insert(stream);
}

// Its own stream may use the memory again at once; other streams only what they were announced for.
void Machine::free(void* memory) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(memory);
  if (found == blocks_.end()) return;
  const Block block = std::move(found->second);
  blocks_.erase(found);
  counters_.held_bytes -= block.num_bytes;
  counters_.held_back += block.used_on.size();
  for (const uint32_t stream : block.used_on) {
    const MarkPtr mark = record_locked(stream);
    push(block.stream, {"wait", {}, nullptr, mark});
    join(clocks_[block.stream], mark->clock);
  }
  push(block.stream, {"poison of freed memory",
                      {},
                      [this, memory, block](const Touched& touched) {
                        touched.write(memory, block.num_bytes);
                        forget_touches(memory, block.num_bytes);
                        std::memset(memory, static_cast<int>(kPoison), block.num_bytes);
                        bury(memory, block.num_bytes);
                      },
                      nullptr});
}

void Machine::free_on_host(void* memory, size_t num_bytes) {
  if (memory == nullptr) return;
  enqueue(
      0, "end of host memory",
      [=, this](const Touched& /*touched*/) {
        forget_touches(memory, num_bytes);
        std::free(memory);
      },
      /*is_kernel=*/false);
}

// What comes to lie there next starts anew.
void Machine::forget_touches(const void* memory, size_t num_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  split(begin);
  split(begin + num_bytes);
  cells_[begin] = {};
  cells_.erase(cells_.upper_bound(begin), cells_.lower_bound(begin + num_bytes));
}

// Keeps freed memory from being handed out again, so that a late touch is told from a new use.
void Machine::bury(void* memory, size_t num_bytes) {
  buried_[reinterpret_cast<uintptr_t>(memory)] = num_bytes;
  burials_.push_back(memory);
  buried_bytes_ += num_bytes;
  while (buried_bytes_ > kMostBuried && burials_.size() > 1) {
    const auto oldest = buried_.find(reinterpret_cast<uintptr_t>(burials_.front()));
    buried_bytes_ -= oldest->second;
    buried_.erase(oldest);
    std::free(burials_.front());
    burials_.pop_front();
  }
}

void Machine::expect_alive(const Touched& by, uintptr_t begin, uintptr_t end) {
  const auto after = buried_.lower_bound(end);
  if (after == buried_.begin()) return;
  const auto last = std::prev(after);
  if (last->first + last->second <= begin) return;
  note_error(std::string(by.name_) + " on stream " + std::to_string(by.stream_) +
             " touches freed memory");
}

// --- races ---------------------------------------------------------------------------------------

void Machine::split(uintptr_t address) {
  const auto after = cells_.upper_bound(address);
  if (after == cells_.begin()) {
    cells_.emplace(address, Cell{});
  } else if (const auto at = std::prev(after); at->first != address) {
    cells_.emplace(address, at->second);
  }
}

void Machine::compare(const Touched& by, const Touch& other) {
  if (other.name == nullptr || other.time <= (*by.clock_)[other.stream]) return;
  const std::lock_guard lock(mutex_);
  races_.push_back(std::string(by.name_) + " on stream " + std::to_string(by.stream_) +
                   " is not ordered with " + other.name + " on stream " +
                   std::to_string(other.stream));
}

void Machine::touch(const Touched& by, uintptr_t begin, uintptr_t end, bool write) {
  if (begin == end) return;
  expect_alive(by, begin, end);
  touched_bytes_ += end - begin;
  split(begin);
  split(end);
  for (auto cell = cells_.find(begin); cell->first != end; ++cell) {
    compare(by, cell->second.write);
    const Touch touch{by.name_, by.stream_, by.time_};
    auto& reads = cell->second.reads;
    if (write) {
      for (const Touch& read : reads) compare(by, read);
      reads.clear();
      cell->second.write = touch;
    } else {
      std::erase_if(reads, [&](const Touch& read) { return read.stream == by.stream_; });
      reads.push_back(touch);
    }
  }
}

// --- for tests -----------------------------------------------------------------------------------

void Machine::set_seed(uint64_t seed) {
  const std::lock_guard lock(mutex_);
  random_.seed(seed);
}
void Machine::set_prices(const Prices& prices) {
  const std::lock_guard lock(mutex_);
  prices_ = prices;
}
Prices Machine::prices() {
  const std::lock_guard lock(mutex_);
  return prices_;
}
void Machine::omit_wait(int64_t number) {
  const std::lock_guard lock(mutex_);
  omitted_ = number;
}
void Machine::count_launches(uint64_t number) {
  const std::lock_guard lock(mutex_);
  counters_.launches += number;
}
Counters Machine::counters() {
  const std::lock_guard lock(mutex_);
  return counters_;
}
std::vector<std::string> Machine::races() {
  const std::lock_guard lock(mutex_);
  return std::exchange(races_, {});
}
void Machine::note_error(const std::string& error) {
  const std::lock_guard lock(mutex_);
  races_.push_back(error);
}

}  // namespace fake_device
