// Runs the blocks of a launch: groups of lanes that are at the same operation, and which goes on.
// By default the group that is furthest behind does, so that groups meet again as soon as the code
// allows; Options::random has any do so, as independent thread scheduling may.
#include <algorithm>
#include <mutex>
#include <numeric>

#include "tests/kernels/ptx/memory.h"

namespace ptx {
namespace {

Counts total;

using Group = Warp::Group;
using State = Warp::Group::State;

class BlockRun {
 public:
  BlockRun(Grid& grid, Block& block) : grid_(grid), block_(block) {}

  // Runs some operations. False when the block is done.
  bool advance() {
    struct Choice {
      Warp* warp;
      size_t group;
    };
    std::vector<Choice> ready;
    for (Warp& warp : block_.warps) {
      if (warp.groups.size() > 1) merge(warp);
      for (size_t i = 0; i < warp.groups.size(); ++i) {
        if (warp.groups[i].state == State::kRuns) ready.push_back({&warp, i});
      }
    }
    if (ready.empty()) return find_deadlock();
    size_t chosen = 0;
    uint64_t budget = ~uint64_t{0};
    if (options().random) {
      chosen = draw() % ready.size();
      budget = 1 + draw() % (draw() % 4 == 0 ? 3 : 300);
    } else {
      if (options().resident_blocks > 1) budget = 1 + draw() % 2000;
      const Warp& first = *ready[0].warp;
      for (size_t i = 1; i < ready.size() && ready[i].warp == &first; ++i) {
        if (first.groups[ready[i].group].pc < first.groups[ready[chosen].group].pc) chosen = i;
      }
    }
    run(*ready[chosen].warp, ready[chosen].group, budget);
    release_barrier();
    return true;
  }

 private:
  Context context(Warp& warp) {
    uint32_t* registers = warp.registers.data();
    auto* constants = const_cast<uint32_t*>(grid_.program.constants.data());
    return {{registers, registers + grid_.program.kernel_words, constants, warp.special.data()},
            0,
            warp.lane_memory.data(),
            grid_.program.lane_bytes,
            warp,
            block_,
            grid_};
  }
  const Op& op_at(const Group& group) const { return grid_.program.code[group.pc]; }

  // Groups that are at the same operation, by the same calls, become one.
  static void merge(Warp& warp) {
    for (size_t i = 0; i < warp.groups.size(); ++i) {
      for (size_t j = i + 1; j < warp.groups.size();) {
        Group &a = warp.groups[i], &b = warp.groups[j];
        const bool barrier = a.state == State::kAtBarrier || b.state == State::kAtBarrier;
        if (a.pc != b.pc || a.stack != b.stack || (barrier && a.state != b.state)) {
          ++j;
          continue;
        }
        a.mask |= b.mask;
        if (!barrier) a.state = State::kRuns;
        warp.groups.erase(warp.groups.begin() + static_cast<ptrdiff_t>(j));
      }
    }
  }

  bool find_deadlock() {
    for (Warp& warp : block_.warps) {
      for (const Group& group : warp.groups) {
        Context c = context(warp);
        c.mask = group.mask;
        fault(c, op_at(group),
              group.state == State::kAtBarrier
                  ? "deadlock: not all threads come to this barrier"
                  : "deadlock: not all lanes come to this operation of a warp");
      }
    }
    return false;
  }

  // Lets all threads pass the barrier once all are there.
  void release_barrier() {
    int live = 0, waiting = 0, set = 0;
    for (const Warp& warp : block_.warps) {
      live += std::popcount(warp.live);
      for (const Group& group : warp.groups) {
        if (group.state == State::kAtBarrier) waiting += std::popcount(group.mask);
      }
    }
    if (live == 0 || waiting != live) return;
    const Op* barrier = nullptr;
    for (Warp& warp : block_.warps) {
      merge(warp);
      if (warp.groups.empty()) continue;
      const Op& op = op_at(warp.groups[0]);
      Context c = context(warp);
      c.mask = warp.groups[0].mask;
      if (warp.groups.size() > 1) fault(c, op, "lanes of a warp come to different barriers");
      if (warp.live != warp.first) fault(c, op, "barrier after some lanes of the warp have ended");
      if (barrier != nullptr && barrier != &op) fault(c, op, "warps come to different barriers");
      barrier = &op;
      if (op.d != kNone) {
        set += std::popcount((mask_of(words_of(c, op.s[0])) ^ (op.is_signed ? kAllLanes : 0)) &
                             c.mask);
      }
    }
    for (Warp& warp : block_.warps) {
      for (Group& group : warp.groups) {
        if (barrier->d != kNone) {
          const bool is_and = barrier->sub == 1;
          uint32_t* d = words_of(context(warp), barrier->d);
          for_lanes(group.mask, [&](uint32_t lane) {
            d[lane] = (is_and ? set == live : set != 0) ? kAllLanes : 0;
          });
        }
        ++group.pc;
        group.state = State::kRuns;
      }
    }
    ++block_.barrier_epoch;
    order_by_barrier(block_);
  }

  // Parameters lie in the memory of lanes, those of every function at places of their own.
  static void copy(const Context& c, const std::vector<Variable>& to,
                   const std::vector<Variable>& from) {
    for_lanes(c.mask, [&](uint32_t lane) {
      uint8_t* memory = c.lane_memory + lane * c.lane_bytes;
      for (size_t i = 0; i < to.size(); ++i) {
        std::memcpy(memory + to[i].offset, memory + from[i].offset, to[i].size);
      }
    });
  }

  // Lanes end.
  static void end(Warp& warp, size_t index) {
    warp.live &= ~warp.groups[index].mask;
    warp.groups.erase(warp.groups.begin() + static_cast<ptrdiff_t>(index));
  }

  // Part of a group does not do its operation.
  static void split(Warp& warp, size_t index, uint32_t rest) {
    Group other = warp.groups[index];
    other.mask = rest;
    ++other.pc;
    warp.groups[index].mask &= ~rest;
    warp.groups.push_back(std::move(other));
  }

  // Whether the lanes of the group do an operation of the warp; else they wait for others.
  static bool meet(Context& c, const Op& op, Group& group) {
    const uint32_t* masks = words_of(c, op.s[3]);
    uint32_t members = 0;
    bool differ = false;
    for_lanes(group.mask, [&](uint32_t lane) {
      differ |= members != 0 && masks[lane] != members;
      members = masks[lane];
    });
    c.mask = group.mask;
    if (differ) fault(c, op, "lanes name different members of a warp's operation");
    if ((group.mask & ~members) != 0) fault(c, op, "a lane is no member of its warp's operation");
    if ((members & ~c.warp.live) != 0) fault(c, op, "a member of a warp's operation has ended");
    if (group.mask != members) {
      group.state = State::kAtWarpSync;
      return false;
    }
    return true;
  }

  // Whether another group is where this one has come to, or is behind it and goes first.
  static bool yields(const Warp& warp, size_t index) {
    const uint32_t pc = warp.groups[index].pc;
    for (size_t i = 0; i < warp.groups.size(); ++i) {
      if (i == index) continue;
      const Group& other = warp.groups[i];
      if (other.pc == pc) return true;
      if (!options().random && other.state == State::kRuns && other.pc < pc) return true;
    }
    return false;
  }

  // Runs a group until it waits, splits, meets another, or has run for `budget` operations.
  void run(Warp& warp, size_t index, uint64_t budget) {
    Context c = context(warp);
    const uint32_t mask = warp.groups[index].mask;
    for (uint64_t i = 0; i < budget; ++i) {
      if (warp.groups.size() > 1 && i != 0 && yields(warp, index)) return;
      Group& group = warp.groups[index];
      const Op& op = op_at(group);
      ++total.instructions;
      uint32_t m = mask;
      if (op.guard != kNone) {
        const uint32_t set = mask_of(words_of(c, op.guard));
        m &= op.negated ? ~set : set;
      }
      c.mask = m;
      if (op.kind == Kind::kNormal) {
        if (m != 0) op.run(c, op);
        ++group.pc;
        continue;
      }
      if (m == 0) {
        ++group.pc;
        continue;
      }
      if (m != mask) {
        // All lanes of a group go on together, or none: these meet the operation again.
        split(warp, index, mask & ~m);
        return;
      }
      if (!change_course(c, op, warp, index)) return;
    }
  }

  // What all lanes of the group do, and where they are then. False: they do not go on at once.
  bool change_course(Context& c, const Op& op, Warp& warp, size_t index) {
    Group& group = warp.groups[index];
    const std::vector<Call>& calls = grid_.program.calls;
    switch (op.kind) {
      case Kind::kBranch: group.pc = op.target; return true;
      case Kind::kCall: {
        const Call& call = calls[op.target];
        if (group.stack.size() == 64) fault(c, op, "calls are nested too deeply");
        copy(c, call.callee->parameters, call.arguments);
        group.stack.push_back(group.pc);
        group.pc = call.callee->start;
        return true;
      }
      case Kind::kReturn: {
        if (group.stack.empty()) {
          end(warp, index);
          return false;
        }
        group.pc = group.stack.back();
        group.stack.pop_back();
        const Call& call = calls[op_at(group).target];
        copy(c, call.results, call.callee->results);
        ++group.pc;
        return true;
      }
      case Kind::kBarrier: group.state = State::kAtBarrier; return false;
      default:
        if (!meet(c, op, group)) return false;
        op.run(c, op);
        ++group.pc;
        return true;
    }
  }

  Grid& grid_;
  Block& block_;
};

void begin_block(const Grid& grid, Block& block, uint32_t index) {
  const Program& program = grid.program;
  block.index = index;
  block.barrier_epoch = 1;
  block.shared.resize(program.shared_bytes);
  draw_bytes(block.shared.data(), block.shared.size());
  block.shared_is_written.assign(program.shared_bytes, 0);
  if (options().races) {
    block.shared_shadow.assign(program.shared_bytes, Shadow{});
    block.acquired.clear();
    block.thread_acquired.assign(grid.num_threads, {});
  }
  block.warps.resize((grid.num_threads + kWarpLanes - 1) / kWarpLanes);
  for (uint32_t w = 0; w < block.warps.size(); ++w) {
    Warp& warp = block.warps[w];
    warp.registers.resize(program.kernel_words + program.function_words);
    warp.lane_memory.resize(program.lane_bytes * kWarpLanes);
    for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      const std::array<uint32_t, 5> values = {w * kWarpLanes + lane, grid.num_threads, index,
                                              grid.num_blocks, lane};
      for (uint32_t i = 0; i < 5; ++i) warp.special[i * kWarpLanes + lane] = values[i];
    }
    warp.index = w;
    warp.sync_epoch = 0;
    const uint32_t lanes = std::min(kWarpLanes, grid.num_threads - kWarpLanes * w);
    warp.live = warp.first = kAllLanes >> (kWarpLanes - lanes);
    warp.groups.assign(1, Group{});
    warp.groups[0].mask = warp.live;
    warp.groups[0].pc = grid.kernel.start;
  }
}

void run_grid(Grid& grid) {
  std::vector<uint32_t> order(grid.num_blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (options().random) {
    for (uint32_t i = grid.num_blocks; i-- > 1;) std::swap(order[i], order[draw() % (i + 1)]);
  }
  static std::vector<Block> places;
  const uint32_t resident = std::min(options().resident_blocks, grid.num_blocks);
  if (places.size() < resident) places.resize(resident);
  uint32_t next = 0;
  std::vector<Block*> active;
  for (; next < resident; ++next) {
    begin_block(grid, places[next], order[next]);
    active.push_back(&places[next]);
  }
  while (!active.empty()) {
    const size_t i = active.size() == 1 ? 0 : draw() % active.size();
    if (BlockRun(grid, *active[i]).advance()) continue;
    if (next < grid.num_blocks) {
      begin_block(grid, *active[i], order[next++]);
    } else {
      active.erase(active.begin() + static_cast<ptrdiff_t>(i));
    }
  }
}

// The modules by the kernels they hold; parsed when one of them runs.
struct Loaded {
  std::string_view text;
  std::unique_ptr<Program> program;
};
std::map<std::string, std::shared_ptr<Loaded>, std::less<>>& loaded() {
  static std::map<std::string, std::shared_ptr<Loaded>, std::less<>> all;
  return all;
}

}  // namespace

Options& options() {
  static Options all;
  return all;
}

uint64_t draw() {
  static uint64_t state = options().seed * 0x9e3779b97f4a7c15u + 1;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state * 0x2545f4914f6cdd1du;
}

void draw_bytes(uint8_t* bytes, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; i += sizeof(uint64_t)) {
    const uint64_t word = draw();
    std::memcpy(bytes + i, &word, std::min(sizeof(word), num_bytes - i));
  }
}

void fault(const Context& c, const Op& op, const std::string& what) {
  std::string_view text = c.grid.program.text;
  for (uint32_t line = 1; line < op.line; ++line) text.remove_prefix(text.find('\n') + 1);
  throw Fault(what + "; kernel " + c.grid.kernel.name + ", block " + std::to_string(c.block.index) +
              ", warp " + std::to_string(c.warp.index) + ", line " + std::to_string(op.line) +
              " of its PTX: " + std::string(text.substr(0, text.find('\n'))));
}

void load_module(std::string_view text) {
  const auto module = std::make_shared<Loaded>(Loaded{text, nullptr});
  constexpr std::string_view kEntry = ".entry ";
  for (size_t at = text.find(kEntry); at != text.npos; at = text.find(kEntry, at + 1)) {
    const size_t begin = at + kEntry.size();
    loaded().insert_or_assign(std::string(text.substr(begin, text.find('(', begin) - begin)),
                              module);
  }
}

void launch(const std::string& kernel, uint32_t num_blocks, uint32_t num_threads, void** args) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  ++total.launches;
  try {
    const auto found = loaded().find(kernel);
    if (found == loaded().end()) throw Fault("no PTX of kernel " + kernel + " was loaded");
    Loaded& module = *found->second;
    if (module.program == nullptr) module.program = parse(module.text);
    const Function& function = module.program->functions.find(kernel)->second;
    if (num_threads == 0 || num_threads > function.max_threads) {
      throw Fault("kernel " + kernel + " takes up to " + std::to_string(function.max_threads) +
                  " threads in a block, not " + std::to_string(num_threads));
    }
    for (size_t i = 0; i < function.parameters.size(); ++i) {
      const Variable& parameter = function.parameters[i];
      std::memcpy(kernel_parameters() + parameter.offset, args[i], parameter.size);
    }
    Grid grid{*module.program,
              function,
              num_blocks,
              num_threads,
              static_cast<uint32_t>(total.launches),
              {}};
    run_grid(grid);
  } catch (const Fault&) {
    ++total.faults;
    throw;
  }
}

Counts counts() { return total; }

}  // namespace ptx
