// Reduction and scan over a thread block, by CUB. Each use needs its own storage in shared memory,
// or a barrier since the last use of the storage.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/cuda.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// A thread's part of a tile's status.
struct StatusPart {
  uint64_t checksum;
  uint32_t flags;
};
struct CombineStatus {
  __device__ StatusPart operator()(StatusPart a, StatusPart b) const {
    return {a.checksum + b.checksum, a.flags | b.flags};
  }
};

template <uint32_t kThreads>
using StatusStorage = typename cub::BlockReduce<StatusPart, kThreads>::TempStorage;

// Adds checksums and combines flags. The result is valid in thread 0 only.
template <uint32_t kThreads>
GRADFERRY_DEVICE StatusPart combine_status(StatusStorage<kThreads>& storage, StatusPart part) {
  return cub::BlockReduce<StatusPart, kThreads>(storage).Reduce(part, CombineStatus());
}

template <uint32_t kThreads>
using ScanStorage = typename cub::BlockScan<uint32_t, kThreads>::TempStorage;

struct Scanned {
  uint32_t before;  // the sum over the threads before this one
  uint32_t total;
};
template <uint32_t kThreads>
GRADFERRY_DEVICE Scanned exclusive_sum(ScanStorage<kThreads>& storage, uint32_t value) {
  Scanned result;
  cub::BlockScan<uint32_t, kThreads>(storage).ExclusiveSum(value, result.before, result.total);
  return result;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
