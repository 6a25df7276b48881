// The machine under the emulator: runs the threads of a block as fibers of one host thread and
// brings them together at barriers and warp-wide operations. Kernels see it through simt.h.
//
// A thread runs until it reaches such a meeting point; when the last one expected arrives, all
// become ready again, and which of the ready threads goes on is drawn from a seed. So a kernel that
// lacks a barrier computes something else under another seed, and ThreadSanitizer, which is told of
// every barrier and fence and of nothing else, names the two accesses under any. Blocks run one
// after the other, in an order of the seed; to ThreadSanitizer they run at the same time.
//
// What is not defined in CUDA ends the launch with a Fault: threads that meet at different places,
// that wait for one that has returned, a mask without the calling lane, a shuffle from a lane
// outside of the mask.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <stdexcept>

namespace simt {

using Where = std::source_location;

// A mistake of a kernel. The message names the kernel, the block, and the line.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr uint32_t kWarpSize = 32;
inline constexpr uint32_t kMostThreads = 1024;
inline constexpr uint32_t kMostSharedBytes = 48 * 1024;

// Which order threads run in, from the next launch on.
void set_seed(uint64_t seed);

// Runs body(context) as every thread of every block.
void run(const char* kernel, uint32_t num_blocks, uint32_t num_threads, void (*body)(void*),
         void* context);

// How many launches there were.
uint64_t num_launches();

// Ends the launch with a Fault.
[[noreturn]] void fail(const char* message, const Where& where);

enum class BarrierOp : uint8_t { kSync, kOr, kAnd, kCount };
int barrier(BarrierOp op, int predicate, const Where& where);

enum class WarpOp : uint8_t { kSync, kShuffle, kBallot, kAll, kAny, kAdd, kMaximum, kMinimum, kOr };
// Gives `value` of lane `source` (kShuffle), or the values of all lanes of the mask combined.
uint64_t meet(WarpOp op, uint32_t mask, uint64_t value, uint32_t source, const Where& where);

// Combines num_threads values of `stride` bytes each to results of the same size.
using Combine = void (*)(const std::byte* values, std::byte* results, size_t stride,
                         uint32_t num_threads);
// What CUB's block-wide operations are made of. `storage` may be used again after a barrier only.
void meet_in_block(const void* storage, size_t storage_bytes, Combine combine, const void* value,
                   void* result, size_t num_bytes, const Where& where);

// To be called by every thread that uses a piece of static shared memory: its content is undefined
// when a block begins. Returns the block's own piece, for which `memory` may stand.
void* enter_shared_memory(void* memory, size_t num_bytes, const Where& where);

// __threadfence(), and what every atomic operation does beside its own work: what a thread wrote
// before a fence and an atomic operation is seen by who reads that number in an atomic operation
// before a fence. Nothing else orders the blocks of a launch.
void fence();
void note_atomic(void* address);

}  // namespace simt
