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

template <bool kRight>
bool run(const char* name) {
  std::vector<uint32_t> out(kThreads), for_blocks(1 + kBlocks * kThreads);
  uint32_t* p = out.data();
  if (std::strcmp(name, "missing_barrier") == 0) {
    launch<missing_barrier<kRight>>(1, kThreads, nullptr, p);
  } else if (std::strcmp(name, "missing_second_barrier") == 0) {
    launch<missing_second_barrier<kRight>>(1, kThreads, nullptr, p);
  } else if (std::strcmp(name, "race") == 0) {
    launch<race<kRight>>(1, kThreads, nullptr, p);
  } else if (std::strcmp(name, "missing_syncwarp") == 0) {
    launch<missing_syncwarp<kRight>>(1, kThreads, nullptr, p);
  } else if (std::strcmp(name, "missing_fence") == 0) {
    launch<missing_fence<kRight>>(kBlocks, kThreads, nullptr, for_blocks.data());
  } else if (std::strcmp(name, "missing_barrier_before_fence") == 0) {
    launch<missing_barrier_before_fence<kRight>>(kBlocks, kThreads, nullptr, for_blocks.data());
  } else if (std::strcmp(name, "out_of_bounds") == 0) {
    launch<out_of_bounds<kRight>>(1, kThreads, nullptr, p);
  } else {
    return false;
  }
  return true;
}

}  // namespace
}  // namespace gradferry::emulated

// planted_faults NAME: with the mistake. planted_faults NAME right: without it.
int main(int argc, char** argv) {
  const bool right = argc == 3 && std::strcmp(argv[2], "right") == 0;
  const bool known = argc >= 2 && (right ? gradferry::emulated::run<true>(argv[1])
                                         : gradferry::emulated::run<false>(argv[1]));
  if (!known) {
    std::fprintf(stderr, "no such kernel\n");
    return 2;
  }
  std::printf("no sanitizer had anything to say\n");
  return 0;
}
