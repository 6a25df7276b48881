#include "tests/kernels/ptx/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <new>

namespace ptx {
namespace {

enum State : uint8_t { kUnallocated, kUnwritten, kWritten };  // of a byte

void* reserve(size_t num_bytes) {
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

// The memory of the device: addresses of the host, and the state of every byte. Pages that nobody
// touches cost nothing.
class Arena {
 public:
  static Arena& get() {
    static Arena arena;
    return arena;
  }

  uint8_t* parameters() { return base_; }
  // The offset of an address; kSize or more if it is not in here.
  size_t offset_of(const void* p) const {
    return static_cast<size_t>(static_cast<const uint8_t*>(p) - base_);
  }
  bool holds(const void* p) const { return offset_of(p) < kSize; }
  uint8_t* state(const void* p) { return state_ + offset_of(p); }
  Shadow* shadow(const void* p) { return shadow_ + offset_of(p); }

  void* allocate(size_t num_bytes) {
    // A power of two, so that memory is found again; guards around it stay unallocated.
    const size_t capacity = std::bit_ceil(num_bytes + 2 * kGuard);
    std::vector<size_t>& free = free_[capacity];
    size_t offset = used_;
    if (!free.empty()) {
      offset = free.front();
      free.erase(free.begin());
    } else {
      used_ += capacity;
      if (used_ > kSize) throw std::bad_alloc();
    }
    uint8_t* memory = base_ + offset + kGuard;
    draw_bytes(memory, num_bytes);
    std::memset(state(memory), kUnwritten, num_bytes);
    live_[offset + kGuard] = {num_bytes, capacity};
    return memory;
  }
  void release(void* memory) {
    const auto found = live_.find(offset_of(memory));
    if (found == live_.end()) throw Fault("memory is released that is not allocated");
    std::memset(state(memory), kUnallocated, found->second.first);
    free_[found->second.second].push_back(found->first - kGuard);
    live_.erase(found);
  }

 private:
  static constexpr size_t kSize = size_t{1} << 32, kGuard = 256;

  Arena()
      : base_(static_cast<uint8_t*>(reserve(kSize))),
        state_(static_cast<uint8_t*>(reserve(kSize))),
        shadow_(static_cast<Shadow*>(options().races ? reserve(kSize * sizeof(Shadow)) : nullptr)) {
    std::memset(state_, kWritten, kParameterBytes);
  }

  uint8_t* base_;
  uint8_t* state_;
  Shadow* shadow_;
  size_t used_ = kParameterBytes;
  std::map<size_t, std::vector<size_t>> free_;        // by capacity
  std::map<size_t, std::pair<size_t, size_t>> live_;  // by offset: bytes, capacity
};

std::string access_name(Access access) {
  return access == Access::kRead ? "read" : access == Access::kWrite ? "write" : "atomic operation";
}

// Whether the shared memory of the block holds what an address of shared memory says.
void check_shared(const Context& c, const Op& op, uint32_t lane, size_t offset, size_t num_bytes,
                  Access access) {
  if (offset + num_bytes > c.grid.program.shared_bytes) {
    fault(c, op, access_name(access) + " beyond shared memory");
  }
  uint8_t* written = c.block.shared_is_written.data() + offset;
  if (access != Access::kWrite &&
      std::find(written, written + num_bytes, 0) != written + num_bytes) {
    fault(c, op, "read of shared memory that nothing wrote");
  }
  if (access != Access::kRead) std::memset(written, 1, num_bytes);
  if (options().races) {
    check_race(c, op, lane, c.block.shared_shadow.data() + offset, num_bytes, access);
  }
}

template <typename F>
void for_addresses(Context& c, const Op& op, F f) {
  const size_t num_bytes = size_t{op.element_bits} / 8 * op.count;
  const uint32_t* address = op.s[0] == kNone ? nullptr : words_of(c, op.s[0]);
  const bool is_wide = op.space != Space::kShared;
  for_lanes(c.mask, [&](uint32_t lane) {
    uint64_t offset = static_cast<uint64_t>(op.offset);
    if (address != nullptr) offset += is_wide ? get<uint64_t>(address, lane) : address[lane];
    // NOLINTNEXTLINE(performance-no-int-to-ptr): registers hold addresses as numbers
    uint8_t* p = reinterpret_cast<uint8_t*>(offset);
    if (op.space == Space::kParameter) p = c.lane_memory + lane * c.lane_bytes + offset;
    if (op.space == Space::kShared) {
      // 32 bits: what lies before shared memory is far beyond it.
      p = c.block.shared.data() + std::min<size_t>(uint32_t(offset), c.block.shared.size());
    }
    f(lane, p, num_bytes);
  });
}

}  // namespace

uint8_t* kernel_parameters() { return Arena::get().parameters(); }
void* allocate(size_t num_bytes) { return Arena::get().allocate(num_bytes); }
void release(void* memory) { Arena::get().release(memory); }

void note_copy(void* to, const void* from, size_t num_bytes) {
  Arena& arena = Arena::get();
  for (const void* p : {static_cast<const void*>(to), from}) {
    if (!arena.holds(p)) continue;
    const uint8_t* state = arena.state(p);
    if (std::find(state, state + num_bytes, kUnallocated) != state + num_bytes) {
      throw Fault("a copy leaves its allocation");
    }
  }
  if (arena.holds(to)) std::memset(arena.state(to), kWritten, num_bytes);
}

void check_access(const Context& c, const Op& op, uint32_t lane, const uint8_t* p, size_t num_bytes,
                  Access access) {
  if (op.space == Space::kParameter) return;
  if (const size_t off = reinterpret_cast<uintptr_t>(p) % num_bytes; off != 0) {
    fault(c, op,
          "misaligned " + access_name(access) + " of " + std::to_string(num_bytes) + " bytes, " +
              std::to_string(off) + " off");
  }
  if (op.space == Space::kShared) {
    return check_shared(c, op, lane, static_cast<size_t>(p - c.block.shared.data()), num_bytes,
                        access);
  }
  Arena& arena = Arena::get();
  if (!arena.holds(p)) fault(c, op, access_name(access) + " at an address that is none");
  uint8_t* state = arena.state(p);
  for (size_t i = 0; i < num_bytes; ++i) {
    if (state[i] == kUnallocated) fault(c, op, access_name(access) + " out of bounds");
    if (state[i] == kUnwritten && access != Access::kWrite) {
      fault(c, op, "read of memory that nothing wrote");
    }
  }
  if (access != Access::kRead) std::memset(state, kWritten, num_bytes);
  if (options().races) check_race(c, op, lane, arena.shadow(p), num_bytes, access);
}

void load(Context& c, const Op& op) {
  const size_t element_bytes = op.element_bits / 8;
  // Addresses first: a destination may be the register that holds them.
  std::array<const uint8_t*, kWarpLanes> from;
  for_addresses(c, op, [&](uint32_t lane, const uint8_t* p, size_t num_bytes) {
    check_access(c, op, lane, p, num_bytes, Access::kRead);
    from[lane] = p;
  });
  for (uint32_t k = 0; k < op.count; ++k) {
    uint32_t* d = words_of(c, op.v[k]);
    for_lanes(c.mask, [&](uint32_t lane) {
      uint64_t value = 0;
      std::memcpy(&value, from[lane] + element_bytes * k, element_bytes);
      if (op.is_signed) {  // extended to the register
        const uint32_t unused = 64 - op.element_bits;
        value = static_cast<uint64_t>(static_cast<int64_t>(value << unused) >> unused);
      }
      if (op.width[k] == 64) {
        put<uint64_t>(d, lane, value);
      } else {
        d[lane] = op.width[k] == 16 ? uint16_t(value) : static_cast<uint32_t>(value);
      }
    });
  }
}

void store(Context& c, const Op& op) {
  const size_t element_bytes = op.element_bits / 8;
  for_addresses(c, op, [&](uint32_t lane, uint8_t* p, size_t num_bytes) {
    check_access(c, op, lane, p, num_bytes, Access::kWrite);
    for (uint32_t k = 0; k < op.count; ++k) {
      const uint32_t* source = words_of(c, op.v[k]);
      const uint64_t value = op.width[k] == 64 ? get<uint64_t>(source, lane) : source[lane];
      std::memcpy(p + element_bytes * k, &value, element_bytes);
    }
  });
}

void atomic(Context& c, const Op& op) {
  const bool is_wide = op.element_bits == 64;
  const auto value_of = [&](Place place, uint32_t lane) {
    return is_wide ? get<uint64_t>(words_of(c, place), lane) : words_of(c, place)[lane];
  };
  for_addresses(c, op, [&](uint32_t lane, uint8_t* p, size_t num_bytes) {
    check_access(c, op, lane, p, num_bytes, Access::kAtomic);
    if (options().races) order_by_atomic(c, op, lane, p);
    uint64_t old = 0;
    std::memcpy(&old, p, num_bytes);
    const uint64_t operand = value_of(op.s[1], lane);
    uint64_t now = old;
    switch (static_cast<Atomic>(op.sub)) {
      case Atomic::kAdd: now = old + operand; break;
      case Atomic::kInc: now = old >= operand ? 0 : old + 1; break;
      case Atomic::kOr: now = old | operand; break;
    }
    std::memcpy(p, &now, num_bytes);
    if (op.d == kNone) return;
    if (is_wide) {
      put<uint64_t>(words_of(c, op.d), lane, old);
    } else {
      words_of(c, op.d)[lane] = static_cast<uint32_t>(old);
    }
  });
}

}  // namespace ptx
