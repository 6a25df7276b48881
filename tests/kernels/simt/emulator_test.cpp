// The emulator itself: what CUDA defines works, what it leaves undefined is caught.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "kernels/common/block_collectives.h"

namespace gradferry::emulated {
namespace {

using Numbers = std::vector<uint32_t>;

// The message of the fault that a launch ends with; empty without one.
template <auto kKernel, typename... Args>
std::string fault_of(uint32_t num_threads, Args... args) {
  try {
    launch<kKernel>(1, num_threads, nullptr, args...);
  } catch (const ::simt::Fault& fault) {
    return fault.what();
  }
  return "";
}
testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" does not contain \"" << part << "\"";
}

__global__ void number_threads(uint32_t* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = gridDim.x * 1000 + threadIdx.x;
}
TEST(Emulator, RunsEveryThreadOfEveryBlock) {
  Numbers out(5 * 96);
  launch<number_threads>(5, 96, nullptr, out.data());
  for (uint32_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], 5000 + i % 96);
}

struct Reversal {
  uint32_t values[64];
};
template <bool kBarrier>
__global__ void reverse(uint32_t* x) {
  GRADFERRY_SHARED(Reversal, shared);
  shared.values[threadIdx.x] = x[threadIdx.x];
  if constexpr (kBarrier) __syncthreads();
  x[threadIdx.x] = shared.values[blockDim.x - 1 - threadIdx.x];
}
Numbers iota(uint32_t n) {
  Numbers x(n);
  for (uint32_t i = 0; i < n; ++i) x[i] = i;
  return x;
}
TEST(Emulator, BarrierMakesWritesVisibleWhateverTheSeed) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    ::simt::set_seed(seed);
    Numbers x = iota(64);
    launch<reverse<true>>(1, 64, nullptr, x.data());
    for (uint32_t i = 0; i < 64; ++i) ASSERT_EQ(x[i], 63 - i);
  }
}
TEST(Emulator, MissingBarrierShowsInTheResult) {
  Numbers reversed = iota(64);
  std::reverse(reversed.begin(), reversed.end());
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    ::simt::set_seed(seed);
    Numbers x = iota(64);
    launch<reverse<false>>(1, 64, nullptr, x.data());
    EXPECT_NE(x, reversed) << "seed " << seed;
  }
}

__global__ void take_turns(uint32_t* counter, uint32_t* turn) {
  turn[threadIdx.x] = atomicAdd(counter, 1);
}
TEST(Emulator, SeedsDrawTheOrderOfThreads) {
  std::set<Numbers> orders;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      ::simt::set_seed(seed);
      Numbers turn(32);
      uint32_t counter = 0;
      launch<take_turns>(1, 32, nullptr, &counter, turn.data());
      orders.insert(turn);
    }
  }
  EXPECT_EQ(orders.size(), 5u);
}

__global__ void use_warp(uint32_t* out) {
  const uint32_t lane = threadIdx.x % 32, mine = threadIdx.x * 10;
  uint32_t* x = out + 12 * threadIdx.x;
  x[0] = __shfl_sync(kAllLanes, mine, 3);
  x[1] = __shfl_xor_sync(kAllLanes, mine, 5);
  x[2] = __shfl_up_sync(kAllLanes, mine, 2u);
  x[3] = __shfl_down_sync(kAllLanes, mine, 2u);
  x[4] = __ballot_sync(kAllLanes, lane % 3 == 0 ? 1 : 0);
  x[5] = static_cast<uint32_t>(__any_sync(kAllLanes, lane == 7 ? 1 : 0));
  x[6] = static_cast<uint32_t>(__all_sync(kAllLanes, lane == 7 ? 1 : 0));
  x[7] = __reduce_add_sync(kAllLanes, lane);
  x[8] = __reduce_max_sync(kAllLanes, mine);
  x[9] = __reduce_or_sync(kAllLanes, 1u << lane);
  // The halves of a warp apart: each of them is whole.
  x[10] = lane < 16 ? __ballot_sync(0x0000ffffu, 1) : __ballot_sync(0xffff0000u, 1);
  const float half = __shfl_xor_sync(kAllLanes, 0.5f * static_cast<float>(lane), 1);
  x[11] = static_cast<uint32_t>(2 * half);
}
TEST(Emulator, WarpOperationsGiveWhatCudaSays) {
  Numbers out(64 * 12);
  launch<use_warp>(1, 64, nullptr, out.data());
  for (uint32_t thread = 0; thread < 64; ++thread) {
    const uint32_t lane = thread % 32, warp = thread - lane;
    const Numbers expected = {10 * (warp + 3),
                              10 * (warp + (lane ^ 5)),
                              10 * (lane < 2 ? thread : thread - 2),
                              10 * (lane >= 30 ? thread : thread + 2),
                              0x49249249u,
                              1,
                              0,
                              31 * 16,
                              10 * (warp + 31),
                              kAllLanes,
                              lane < 16 ? 0x0000ffffu : 0xffff0000u,
                              lane ^ 1};
    EXPECT_EQ(Numbers(out.begin() + 12 * thread, out.begin() + 12 * thread + 12), expected);
  }
}

__global__ void vote(uint32_t* out) {
  const int mine = threadIdx.x < 20 ? 1 : 0;
  const int any = __syncthreads_or(mine), all = __syncthreads_and(mine);
  out[threadIdx.x] = static_cast<uint32_t>(100 * any + 1000 * all + __syncthreads_count(mine));
}
TEST(Emulator, BarriersVote) {
  Numbers out(64);
  launch<vote>(1, 64, nullptr, out.data());
  EXPECT_EQ(out, Numbers(64, 120));
  Numbers few(16);
  launch<vote>(1, 16, nullptr, few.data());
  EXPECT_EQ(few, Numbers(16, 1116));
}

__global__ void read_fresh_memory(uint32_t* out) {
  GRADFERRY_SHARED(Reversal, shared);
  out[threadIdx.x] = shared.values[threadIdx.x];
  shared.values[threadIdx.x] = 0;
}
TEST(Emulator, SharedMemoryBeginsUndefined) {
  Numbers out(64);
  launch<read_fresh_memory>(2, 64, nullptr, out.data());
  for (const uint32_t x : out) EXPECT_NE(x, 0u);
}

// --- faults --------------------------------------------------------------------------------------

__global__ void diverge_at_barriers() {
  // NOLINTNEXTLINE(bugprone-branch-clone): the same barrier twice is the mistake
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
TEST(Emulator, CatchesBarriersInDivergentCode) {
  const std::string fault = fault_of<diverge_at_barriers>(32);
  EXPECT_TRUE(contains(fault, "diverge_at_barriers"));
  EXPECT_TRUE(contains(fault, "emulator_test.cpp"));
  EXPECT_TRUE(contains(fault, "wait for each other"));
}

__global__ void return_before_barrier() {
  if (threadIdx.x == 5) return;
  __syncthreads();
}
TEST(Emulator, CatchesAThreadThatReturnsBeforeABarrier) {
  EXPECT_TRUE(contains(fault_of<return_before_barrier>(32), "thread 5 has returned"));
}

__global__ void leave_itself_out() { __syncwarp(threadIdx.x == 3 ? ~8u : kAllLanes); }
TEST(Emulator, CatchesALaneOutsideOfItsMask) {
  ::simt::set_seed(1);
  const std::string fault = fault_of<leave_itself_out>(32);
  EXPECT_FALSE(fault.empty());
}

__global__ void take_from_outside() {
  if (threadIdx.x < 16) __shfl_sync(0x0000ffffu, threadIdx.x, 20);
}
TEST(Emulator, CatchesAShuffleFromOutsideOfTheMask) {
  EXPECT_TRUE(contains(fault_of<take_from_outside>(32), "which is not in the mask"));
}

__global__ void diverge_in_a_warp() {
  if (threadIdx.x % 2 == 0) {
    __ballot_sync(kAllLanes, 1);
  } else {
    __shfl_sync(kAllLanes, threadIdx.x, 0);
  }
}
TEST(Emulator, CatchesLanesThatMeetAtDifferentPlaces) {
  const std::string fault = fault_of<diverge_in_a_warp>(32);
  EXPECT_TRUE(contains(fault, "a shuffle in"));
  EXPECT_TRUE(contains(fault, "__ballot_sync in"));
}

__global__ void wait_for_a_missing_lane() {
  if (threadIdx.x != 9) __syncwarp();
}
TEST(Emulator, CatchesALaneThatNeverComes) {
  EXPECT_TRUE(contains(fault_of<wait_for_a_missing_lane>(32), "thread 9 has returned"));
}

template <bool kBarrier>
__global__ void use_storage_twice(uint32_t* out) {
  GRADFERRY_SHARED(ScanStorage<64>, storage);
  const Scanned first = exclusive_sum<64>(storage, threadIdx.x);
  if constexpr (kBarrier) __syncthreads();
  const Scanned second = exclusive_sum<64>(storage, 1);
  out[threadIdx.x] = first.before + 10000 * second.before + first.total + second.total;
}
TEST(Emulator, CatchesTempStorageUsedAgainWithoutABarrier) {
  Numbers out(64);
  EXPECT_EQ(fault_of<use_storage_twice<true>>(64, out.data()), "");
  for (uint32_t i = 0; i < 64; ++i) {
    EXPECT_EQ(out[i], i * (i - 1) / 2 + 10000 * i + 63 * 32 + 64);
  }
  EXPECT_TRUE(contains(fault_of<use_storage_twice<false>>(64, out.data()), "TempStorage"));
}

__global__ void sum_statuses(uint32_t* out) {
  GRADFERRY_SHARED(StatusStorage<64>, storage);
  const StatusPart all = combine_status<64>(storage, {threadIdx.x, 1u << threadIdx.x % 4});
  const auto checksum = static_cast<uint32_t>(all.checksum);
  out[threadIdx.x] = threadIdx.x == 0 ? checksum + all.flags : checksum;
}
TEST(Emulator, ReductionIsKnownToThreadZeroAlone) {
  Numbers out(64);
  launch<sum_statuses>(1, 64, nullptr, out.data());
  EXPECT_EQ(out[0], 63 * 32 + 15u);
  for (uint32_t i = 1; i < 64; ++i) EXPECT_EQ(out[i], 0xa5a5a5a5u);
}

__global__ void read_misaligned(const std::byte* p, uint32_t* out) {
  *out = read<Bytes16>(p + 4).word[0];
}
TEST(Emulator, CatchesMisalignedAccesses) {
  alignas(16) std::byte bytes[32] = {};
  uint32_t out = 0;
  const std::byte* p = bytes;
  EXPECT_TRUE(contains(fault_of<read_misaligned>(1, p, &out), "misaligned read"));
}

struct TooMuch {
  std::byte bytes[48 * 1024 + 1];
};
__global__ void share_too_much() {
  GRADFERRY_SHARED(TooMuch, shared);
  shared.bytes[0] = std::byte(1);
}
TEST(Emulator, CatchesTooMuchSharedMemory) {
  EXPECT_TRUE(contains(fault_of<share_too_much>(1), "48 KB"));
}

TEST(Emulator, GoesOnAfterAFault) {
  EXPECT_FALSE(fault_of<return_before_barrier>(32).empty());
  Numbers x = iota(64);
  EXPECT_EQ((fault_of<reverse<true>>(64, x.data())), "");
  EXPECT_EQ(x[0], 63u);
}

}  // namespace
}  // namespace gradferry::emulated
