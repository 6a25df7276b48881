// A machine for PTX: parses what nvcc emits and runs it on the CPU, warp by warp, 32 lanes at once.
// It checks what a GPU does not: alignment of every access, bounds of every allocation to the byte,
// memory that nothing wrote, barriers that part of a warp reaches, warp operations whose lanes do
// not all come, and, where asked, data races. It refuses to load what would let ptxas choose the
// bits of a result (fused or approximate arithmetic, subnormal numbers flushed to zero).
//
// It does not see what ptxas makes of PTX (instructions, spills, registers), nor caches, timing,
// occupancy or streams: a launch is over when it returns, and one launch runs at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace ptx {

struct Options {
  // What the PTX manual leaves open is drawn from `seed`: which warp and which lanes of it go on,
  // for how long, in which order blocks begin, which NaN arithmetic gives. Otherwise the lanes that
  // are furthest behind go on, blocks run in turn, and NaNs are those of GPUs.
  bool random = false;
  uint64_t seed = 1;
  // So many blocks at once, which take turns at random.
  uint32_t resident_blocks = 1;
  // Of the device, each with room for one block: what callers make their grids from.
  uint32_t multiprocessors = 1000;
  // Happens-before check of global and shared memory. What orders: __syncthreads(), __syncwarp(),
  // and between blocks an atomic operation that releases, and one that acquires its number.
  bool races = false;
};
// To be set before memory is allocated.
Options& options();

// What a kernel or a caller did wrong. The message names the kernel, the block, the warp and the
// line of the PTX. It ends the launch.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// --- memory of the device

// Fresh memory holds random bytes, and counts as unwritten until a copy or a kernel writes it.
void* allocate(size_t num_bytes);
void release(void* memory);
// Notes a copy to the device, from it or within it. Throws Fault where it leaves an allocation.
void note_copy(void* to, const void* from, size_t num_bytes);

// --- kernels

// Takes in the kernels of a module. `text` must stay; it is parsed when one of them is launched.
// Throws Fault, then, where the machine does not know an instruction or refuses it.
void load_module(std::string_view text);
// args[i] points to parameter i, as in cudaLaunchKernel(). One-dimensional grids.
void launch(const std::string& kernel, uint32_t num_blocks, uint32_t num_threads, void** args);

struct Counts {
  uint64_t launches = 0;
  uint64_t instructions = 0;  // of warps
  uint64_t faults = 0;
};
Counts counts();

}  // namespace ptx
