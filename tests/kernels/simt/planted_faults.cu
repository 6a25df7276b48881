// Kernels with a mistake each, for the sanitizers to find: run with the name of one. Every
// sanitizer must name the kernel and the line, which the tests ask for by the words in the
// comments.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/common/cuda.h"

namespace gradferry::emulated {
namespace {

constexpr uint32_t kThreads = 64;

struct Values {
  uint32_t x[kThreads];
};

// Threads of other warps read what this one writes.
template <bool kBarrier>
__global__ void missing_barrier(uint32_t* out) {
  GRADFERRY_SHARED(Values, shared);
  shared.x[threadIdx.x] = threadIdx.x;
  if constexpr (kBarrier) __syncthreads();
  out[threadIdx.x] = shared.x[(threadIdx.x + 32) % kThreads];
}

// The barrier comes, but the next round's write does not wait for this round's reads.
template <bool kBarrier>
__global__ void missing_second_barrier(uint32_t* out) {
  GRADFERRY_SHARED(Values, shared);
  for (uint32_t round = 0; round < 2; ++round) {
    shared.x[threadIdx.x] = round;
    __syncthreads();
    out[threadIdx.x] = shared.x[(threadIdx.x + 32) % kThreads];
    if constexpr (kBarrier) __syncthreads();
  }
}

// Two threads add to one number; with atomicAdd they may.
template <bool kAtomic>
__global__ void race(uint32_t* out) {
  if constexpr (kAtomic) {
    atomicAdd(out, 1);
  } else {
    out[0] += 1;
  }
}

// Neighbours in a warp, without __syncwarp.
template <bool kSync>
__global__ void missing_syncwarp(uint32_t* out) {
  GRADFERRY_SHARED(Values, shared);
  shared.x[threadIdx.x] = threadIdx.x;
  if constexpr (kSync) __syncwarp();
  out[threadIdx.x] = shared.x[threadIdx.x ^ 1];
}

// The last block that counts itself reads what all of them wrote.
constexpr uint32_t kBlocks = 3;

template <bool kFence>
__global__ void missing_fence(uint32_t* out) {
  uint32_t* values = out + 1;
  values[blockIdx.x * kThreads + threadIdx.x] = threadIdx.x;
  __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    if constexpr (kFence) __threadfence();
    is_last = atomicInc(out, kBlocks - 1) == kBlocks - 1;
    if constexpr (kFence) __threadfence();
  }
  if (__syncthreads_or(is_last ? 1 : 0) == 0) return;
  uint32_t sum = 0;
  for (uint32_t block = 0; block < kBlocks; ++block) sum += values[block * kThreads + threadIdx.x];
  values[threadIdx.x] = sum;
}

// The fence is there, but thread 0 does not wait for what the others write.
template <bool kBarrier>
__global__ void missing_barrier_before_fence(uint32_t* out) {
  uint32_t* values = out + 1;
  values[blockIdx.x * kThreads + threadIdx.x] = threadIdx.x;
  if constexpr (kBarrier) __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    is_last = atomicInc(out, kBlocks - 1) == kBlocks - 1;
    __threadfence();
  }
  if (__syncthreads_or(is_last ? 1 : 0) == 0) return;
  values[threadIdx.x] += values[(threadIdx.x + 1) % kThreads + (kBlocks - 1) * kThreads] +
                         values[(threadIdx.x + 2) % kThreads + kThreads];
}

// One element more than there are.
template <bool kInside>
__global__ void out_of_bounds(uint32_t* out) {
  const uint32_t next = threadIdx.x + (kInside ? 0 : 1);
  const uint32_t read_here = out[next];
  out[threadIdx.x] = read_here;
}

template <auto kKernel>
void run(uint32_t num_blocks) {
  std::vector<uint32_t> out(num_blocks == 1 ? kThreads : 1 + num_blocks * kThreads);
  launch<kKernel>(num_blocks, kThreads, nullptr, out.data());
}

struct Planted {
  const char* name;
  uint32_t num_blocks;
  void (*wrong)(uint32_t);
  void (*right)(uint32_t);
};
const Planted kAll[] = {
    {"missing_barrier", 1, run<missing_barrier<false>>, run<missing_barrier<true>>},
    {"missing_second_barrier", 1, run<missing_second_barrier<false>>,
     run<missing_second_barrier<true>>},
    {"race", 1, run<race<false>>, run<race<true>>},
    {"missing_syncwarp", 1, run<missing_syncwarp<false>>, run<missing_syncwarp<true>>},
    {"missing_fence", kBlocks, run<missing_fence<false>>, run<missing_fence<true>>},
    {"missing_barrier_before_fence", kBlocks, run<missing_barrier_before_fence<false>>,
     run<missing_barrier_before_fence<true>>},
    {"out_of_bounds", 1, run<out_of_bounds<false>>, run<out_of_bounds<true>>},
};

// Runs the kernel of this name with its mistake, or all without them. Returns how many it ran.
int run_named(const char* name) {
  const bool right = std::strcmp(name, "right") == 0;
  int count = 0;
  for (const Planted& planted : kAll) {
    if (!right && std::strcmp(name, planted.name) != 0) continue;
    (right ? planted.right : planted.wrong)(planted.num_blocks);
    ++count;
  }
  return count;
}

}  // namespace
}  // namespace gradferry::emulated

// planted_faults NAME: with the mistake. planted_faults right: all kernels, without mistakes.
int main(int argc, char** argv) {
  if (argc != 2 || gradferry::emulated::run_named(argv[1]) == 0) {
    std::fprintf(stderr, "no such kernel\n");
    return 2;
  }
  std::printf("no sanitizer had anything to say\n");
  return 0;
}
