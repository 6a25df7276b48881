// Happens-before, by epochs: a barrier begins an epoch of its block, __syncwarp() one of its warp.
// Between blocks, an atomic operation that releases covers what its block did in earlier epochs,
// and what that block knew then of others; who acquires by an operation on the same number knows
// it, whatever relaxed operations there were in between.
#include <algorithm>

#include "tests/kernels/ptx/memory.h"

namespace ptx {
namespace {

constexpr uint32_t kSyncBits = 14;  // of an epoch: how many __syncwarp() there were
constexpr uint32_t kSyncMask = (1u << kSyncBits) - 1;
constexpr uint32_t kAtomicBit = 0x80000000u;  // of a writer

// Number of a thread in its grid, from 1.
uint32_t thread_number(const Context& c, uint32_t lane) {
  return c.block.index * c.grid.num_threads + c.warp.index * kWarpLanes + lane + 1;
}
uint32_t thread_in_block(const Context& c, uint32_t lane) {
  return c.warp.index * kWarpLanes + lane;
}
uint32_t epoch_of(const Context& c) {
  return c.block.barrier_epoch << kSyncBits | (c.warp.sync_epoch & kSyncMask);
}

// Whether what thread `other` did at `epoch` comes before what this lane does now.
bool is_ordered(const Context& c, uint32_t lane, uint32_t other, uint32_t epoch) {
  if (other == 0 || other == thread_number(c, lane)) return true;
  const uint32_t their_block = (other - 1) / c.grid.num_threads, barrier = epoch >> kSyncBits;
  if (their_block == c.block.index) {
    if (barrier < c.block.barrier_epoch) return true;
    const bool same_warp = (other - 1) % c.grid.num_threads / kWarpLanes == c.warp.index;
    return same_warp && (epoch & kSyncMask) != (c.warp.sync_epoch & kSyncMask);
  }
  const auto knows = [&](const Block::Clock& clock) {
    return their_block < clock.size() && clock[their_block] > barrier;
  };
  return knows(c.block.acquired) || knows(c.block.thread_acquired[thread_in_block(c, lane)]);
}

// The later of both, block by block.
void join(Block::Clock& clock, const Block::Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

}  // namespace

void check_race(const Context& c, const Op& op, uint32_t lane, Shadow* shadow, size_t num_bytes,
                Access access) {
  const bool is_atomic = access == Access::kAtomic;
  for (size_t i = 0; i < num_bytes; ++i) {
    Shadow& byte = shadow[i];
    if (byte.launch != c.grid.number) byte = {c.grid.number, 0, 0, 0, 0};
    const bool was_atomic = (byte.writer & kAtomicBit) != 0;
    if (!(is_atomic && was_atomic) &&
        !is_ordered(c, lane, byte.writer & ~kAtomicBit, byte.written)) {
      fault(c, op,
            access == Access::kRead ? "race: read after a write that nothing orders"
                                    : "race: write after a write that nothing orders");
    }
    if (access == Access::kRead) {
      byte.reader = thread_number(c, lane);
      byte.read = epoch_of(c);
      continue;
    }
    if (!is_ordered(c, lane, byte.reader, byte.read)) {
      fault(c, op, "race: write after a read that nothing orders");
    }
    byte.writer = thread_number(c, lane) | (is_atomic ? kAtomicBit : 0);
    byte.written = epoch_of(c);
  }
}

void order_by_atomic(const Context& c, const Op& op, uint32_t lane, const void* address) {
  Block::Clock& clock = c.grid.released[address];
  clock.resize(c.grid.num_blocks);
  if (op.acquires) join(c.block.thread_acquired[thread_in_block(c, lane)], clock);
  if (!op.releases) return;
  clock[c.block.index] = std::max(clock[c.block.index], c.block.barrier_epoch);
  join(clock, c.block.acquired);
}

void order_by_barrier(Block& block) {
  for (const Block::Clock& clock : block.thread_acquired) join(block.acquired, clock);
}

}  // namespace ptx
