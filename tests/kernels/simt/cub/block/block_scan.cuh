// A stand-in for CUB's BlockScan: the part that kernels/common/block_collectives.h uses.
// TempStorage must not be used again without a barrier.
#pragma once

#include "tests/kernels/simt/machine.h"

namespace cub {

template <typename T, int kBlockThreads>
class BlockScan {
 public:
  struct TempStorage {
    unsigned char bytes[64];
  };
  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  // `before`: the sum over the threads before this one.
  void ExclusiveSum(T value, T& before, T& total,
                    const simt::Where& where = simt::Where::current()) {
    const T given[2] = {value, 0};
    T result[2];
    simt::meet_in_block(&storage_, sizeof(storage_), &combine, given, result, sizeof(result),
                        where);
    before = result[0];
    total = result[1];
  }

 private:
  __attribute__((no_sanitize("thread"))) static void combine(const std::byte* values,
                                                             std::byte* results, size_t stride,
                                                             uint32_t num_threads) {
    if (num_threads != kBlockThreads) simt::fail("BlockScan of another size", {});
    T total = 0, next;
    for (uint32_t i = 0; i < num_threads; ++i) {
      __builtin_memcpy(results + i * stride, &total, sizeof(T));
      __builtin_memcpy(&next, values + i * stride, sizeof(T));
      total += next;
    }
    for (uint32_t i = 0; i < num_threads; ++i) {
      __builtin_memcpy(results + i * stride + sizeof(T), &total, sizeof(T));
    }
  }

  TempStorage& storage_;
};

}  // namespace cub
