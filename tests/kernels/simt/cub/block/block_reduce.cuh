// A stand-in for CUB's BlockReduce: the part that kernels/common/block_collectives.h uses. As with
// CUB, the result is thread 0's alone, and TempStorage must not be used again without a barrier.
#pragma once

#include "tests/kernels/simt/machine.h"

namespace cub {

template <typename T, int kBlockThreads>
class BlockReduce {
 public:
  struct TempStorage {
    unsigned char bytes[64];
  };
  explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

  template <typename Op>
  T Reduce(T value, Op, const simt::Where& where = simt::Where::current()) {
    T result;
    simt::meet_in_block(&storage_, sizeof(storage_), &combine<Op>, &value, &result, sizeof(T),
                        where);
    return result;
  }

 private:
  // Runs on whichever thread arrives last, in the emulator's own memory.
  template <typename Op>
  __attribute__((no_sanitize("thread"))) static void combine(const std::byte* values,
                                                             std::byte* results, size_t stride,
                                                             uint32_t num_threads) {
    if (num_threads != kBlockThreads) simt::fail("BlockReduce of another size", {});
    T sum, next;
    __builtin_memcpy(&sum, values, sizeof(T));
    for (uint32_t i = 1; i < num_threads; ++i) {
      __builtin_memcpy(&next, values + i * stride, sizeof(T));
      sum = Op()(sum, next);
    }
    // Not by memset, which ThreadSanitizer would see.
    auto* unknown = reinterpret_cast<volatile unsigned char*>(results);
    for (size_t i = 0; i < num_threads * stride; ++i) unknown[i] = 0xa5;
    __builtin_memcpy(results, &sum, sizeof(T));
  }

  TempStorage& storage_;
};

}  // namespace cub
