// Memory as kernels access it, with every check of it.
#pragma once

#include "tests/kernels/ptx/program.h"

namespace ptx {

enum class Access : uint8_t { kRead, kWrite, kAtomic };

// Where parameters of the running kernel are: device memory that nobody allocates.
inline constexpr size_t kParameterBytes = 4096;
uint8_t* kernel_parameters();

// Throws Fault unless the lane may access `num_bytes` there.
void check_access(const Context& c, const Op& op, uint32_t lane, const uint8_t* p, size_t num_bytes,
                  Access access);

// --- races

// Notes an access of `num_bytes` with these shadows. Throws Fault if it is not ordered after those
// of other threads.
void check_race(const Context& c, const Op& op, uint32_t lane, Shadow* shadow, size_t num_bytes,
                Access access);
// What an atomic operation at `address` makes known to the lane, and to others.
void order_by_atomic(const Context& c, const Op& op, uint32_t lane, const void* address);
// What a barrier makes known to all threads of the block.
void order_by_barrier(Block& block);

// --- operations

void load(Context& c, const Op& op);
void store(Context& c, const Op& op);
// `sub` is the operation.
enum class Atomic : uint8_t { kAdd, kInc, kOr };
void atomic(Context& c, const Op& op);

}  // namespace ptx
