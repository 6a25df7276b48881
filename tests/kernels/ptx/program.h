// A module of PTX as the machine runs it, and the state of what runs.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "tests/kernels/ptx/machine.h"

namespace ptx {

inline constexpr uint32_t kWarpLanes = 32;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

// Where an operand is: a bank in the upper bits, and the number of its first 32-bit word. An
// operand has 32 words, one per lane; one of 64 bits has 64, two per lane.
using Place = uint32_t;
inline constexpr Place kNone = 0xffffffffu;
enum Bank : uint32_t { kOfKernel, kOfFunctions, kConstants, kSpecial };
inline constexpr uint32_t kBankShift = 30;

struct Op;
struct Context;

enum class Kind : uint8_t { kNormal, kBranch, kCall, kReturn, kBarrier, kWarpSync };

enum class Space : uint8_t { kGlobal, kShared, kParameter };

struct Op {
  void (*run)(Context&, const Op&) = nullptr;
  Kind kind = Kind::kNormal;
  bool negated = false;  // the guard
  uint8_t sub = 0;       // which of several similar operations
  Place guard = kNone;
  Place d = kNone, d2 = kNone;  // destinations
  std::array<Place, 4> s = {kNone, kNone, kNone, kNone};
  // Loads, stores, and moves of several registers: those registers and their bits.
  std::array<Place, 4> v = {kNone, kNone, kNone, kNone};
  std::array<uint8_t, 4> width = {};
  uint8_t count = 1;
  uint8_t element_bits = 0;
  bool is_signed = false;
  bool acquires = false, releases = false;  // an atomic operation, at the scope of the device
  Space space = Space::kGlobal;
  int64_t offset = 0;   // of an address
  uint32_t target = 0;  // of a branch; of a call: its number in Program::calls
  uint32_t line = 0;
};

// A variable: bytes, and where they begin.
struct Variable {
  size_t size = 0, align = 1, offset = 0;
};

struct Function {
  std::string name;
  bool is_kernel = false;
  bool is_defined = false;
  uint32_t start = 0;  // its first operation
  std::vector<Variable> parameters, results;
  size_t parameter_bytes = 0;  // of a kernel
  uint32_t max_threads = 1024;
};

struct Call {
  const Function* callee = nullptr;
  std::vector<Variable> arguments, results;  // at the caller
};

struct Program {
  std::string_view text;
  std::vector<Op> code;
  std::vector<uint32_t> constants;
  std::map<std::string, Function, std::less<>> functions;
  std::vector<Call> calls;
  size_t shared_bytes = 0;
  size_t lane_bytes = 16;  // parameters of functions
  uint32_t kernel_words = 0, function_words = 0;
};

std::unique_ptr<Program> parse(std::string_view text);

// --- what runs

struct Warp {
  struct Group {  // lanes that are at the same operation
    enum class State : uint8_t { kRuns, kAtBarrier, kAtWarpSync };
    uint32_t mask = 0;
    uint32_t pc = 0;
    State state = State::kRuns;
    std::vector<uint32_t> stack;
  };
  std::vector<uint32_t> registers;
  std::vector<uint8_t> lane_memory;
  std::array<uint32_t, 5 * kWarpLanes> special;
  std::vector<Group> groups;
  uint32_t index = 0;
  uint32_t live = 0, first = 0;  // lanes now, and at the beginning
  uint32_t sync_epoch = 0;       // how many __syncwarp() there were
};

// The last accesses of a byte, for races.
struct Shadow {
  uint32_t launch, writer, written, reader, read;
};

struct Block {
  uint32_t index = 0;
  std::vector<uint8_t> shared, shared_is_written;
  std::vector<Shadow> shared_shadow;
  std::vector<Warp> warps;
  uint32_t barrier_epoch = 1;
  // For races: by block, before which epoch all is known to this block, and to each of its threads.
  using Clock = std::vector<uint32_t>;
  Clock acquired;
  std::vector<Clock> thread_acquired;
};

struct Grid {
  const Program& program;
  const Function& kernel;
  uint32_t num_blocks, num_threads, number;
  std::unordered_map<const void*, Block::Clock> released;  // clocks of atomic operations
};

// What an operation sees: the lanes of `mask` do it.
struct Context {
  std::array<uint32_t*, 4> banks;
  uint32_t mask;
  uint8_t* lane_memory;
  size_t lane_bytes;
  Warp& warp;
  Block& block;
  Grid& grid;
};

[[noreturn]] void fault(const Context& c, const Op& op, const std::string& what);

uint64_t draw();
void draw_bytes(uint8_t* bytes, size_t num_bytes);

inline uint32_t* words_of(const Context& c, Place place) {
  return c.banks[place >> kBankShift] + (place & ((1u << kBankShift) - 1));
}

// A predicate: all bits or none.
struct Pred {
  uint32_t bits;
};

template <typename T>
T get(const uint32_t* p, uint32_t lane) {
  if constexpr (sizeof(T) == 8) {
    uint64_t bits;
    std::memcpy(&bits, p + 2 * lane, 8);
    return std::bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(p[lane]);
  } else {
    return static_cast<T>(p[lane]);
  }
}
template <typename T>
void put(uint32_t* p, uint32_t lane, T value) {
  if constexpr (sizeof(T) == 8) {
    std::memcpy(p + 2 * lane, &value, 8);
  } else if constexpr (sizeof(T) == 4) {
    p[lane] = std::bit_cast<uint32_t>(value);
  } else {
    p[lane] = static_cast<std::make_unsigned_t<T>>(value);
  }
}

template <typename F>
void for_lanes(uint32_t mask, F f) {
  if (mask == kAllLanes) {
    for (uint32_t i = 0; i < kWarpLanes; ++i) f(i);
  } else {
    for (uint32_t m = mask; m != 0; m &= m - 1) f(static_cast<uint32_t>(std::countr_zero(m)));
  }
}

inline uint32_t mask_of(const uint32_t* predicate) {
  uint32_t mask = 0;
  for (uint32_t i = 0; i < kWarpLanes; ++i) mask |= (predicate[i] & 1u) << i;
  return mask;
}

}  // namespace ptx
