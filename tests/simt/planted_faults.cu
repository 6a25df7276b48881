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

// One element more than there are.
template <bool kInside>
__global__ void out_of_bounds(uint32_t* out) {
  const uint32_t next = threadIdx.x + (kInside ? 0 : 1);
  const uint32_t read_here = out[next];
  out[threadIdx.x] = read_here;
}

template <bool kRight>
bool run(const char* name) {
  std::vector<uint32_t> out(kThreads);
  uint32_t* p = out.data();
  if (std::strcmp(name, "missing_barrier") == 0) {
    launch<missing_barrier<kRight>>(1, kThreads, nullptr, p);
  } else if (std::strcmp(name, "missing_second_barrier") == 0) {
    launch<missing_second_barrier<kRight>>(1, kThreads, nullptr, p);
  } else if (std::strcmp(name, "race") == 0) {
    launch<race<kRight>>(1, kThreads, nullptr, p);
  } else if (std::strcmp(name, "missing_syncwarp") == 0) {
    launch<missing_syncwarp<kRight>>(1, kThreads, nullptr, p);
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
