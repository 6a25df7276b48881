// Kernels with one mistake each, which the machine finds, and without it, in which it finds
// nothing.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <array>
#include <ostream>
#include <string>

#include "tests/kernels/ptx/machine.h"

namespace {

constexpr uint32_t kThreads = 64, kBlocks = 8;
// Of an allocation, and those of them that are written: number i is i, but the first is 0.
constexpr uint32_t kNumbers = 2048, kWritten = 1024;

[[maybe_unused]] const bool is_prepared = [] {
  ptx::options().races = true;
  ptx::options().resident_blocks = 3;
  return true;
}();

struct alignas(16) Four {
  uint32_t word[4];
};

template <bool kRight>
__global__ void misaligned(uint32_t* p) {
  const Four four = *reinterpret_cast<Four*>(p + (kRight ? 4 : 1));
  p[threadIdx.x + kThreads] = four.word[0] + four.word[3];
}
template <bool kRight>
__global__ void out_of_bounds(uint32_t* p) {
  p[threadIdx.x + (kRight ? 0 : kNumbers - kThreads + 1)] = 1;
}
template <bool kRight>
__global__ void unwritten(uint32_t* p) {
  p[threadIdx.x] = p[(kRight ? 0 : kWritten) + threadIdx.x];
}
template <bool kRight>
__global__ void unwritten_shared(uint32_t* p) {
  __shared__ uint32_t shared[kThreads];
  if (kRight || threadIdx.x != 5) shared[threadIdx.x] = 1;
  __syncthreads();
  p[threadIdx.x] = shared[(threadIdx.x + 32) % kThreads];
}
template <bool kRight>
__global__ void no_barrier(uint32_t* p) {
  __shared__ uint32_t shared[kThreads];
  shared[threadIdx.x] = 0;
  __syncthreads();
  shared[threadIdx.x] = threadIdx.x;
  if (kRight) __syncthreads();
  p[threadIdx.x] = shared[(threadIdx.x + 32) % kThreads];
}
// The next round's write does not wait for this round's reads.
template <bool kRight>
__global__ void no_second_barrier(uint32_t* p) {
  __shared__ uint32_t shared[kThreads];
  for (uint32_t round = 0; round < 2; ++round) {
    shared[threadIdx.x] = p[threadIdx.x] + round;
    __syncthreads();
    p[kThreads + threadIdx.x] = shared[(threadIdx.x + 32) % kThreads];
    if (kRight) __syncthreads();
  }
}
template <bool kRight>
__global__ void no_syncwarp(uint32_t* p) {
  __shared__ uint32_t shared[kThreads];
  shared[threadIdx.x] = threadIdx.x;
  if (kRight) __syncwarp();
  p[threadIdx.x] = shared[threadIdx.x ^ 1];
}
template <bool kRight>
__global__ void no_atomic(uint32_t* p) {
  if (kRight) {
    atomicAdd(p, 1);
  } else {
    p[0] += 1;
  }
}
template <bool kRight>
__global__ void divergent_barrier(uint32_t* p) {
  if (kRight || (p[threadIdx.x] & 1) != 0) __syncthreads();
  p[threadIdx.x] = 1;
}
template <bool kRight>
__global__ void lanes_that_do_not_come(uint32_t* p) {
  if (kRight || p[threadIdx.x] > 3) p[threadIdx.x] = __shfl_xor_sync(~0u, p[threadIdx.x], 1);
}

// The last block that counts itself reads what all of them wrote; without one of what orders that.
#define COUNTS_BLOCK(semantics)                                             \
  [](uint32_t* count) {                                                     \
    uint32_t before;                                                        \
    asm volatile("atom." semantics ".gpu.global.inc.u32 %0, [%1], %2;"      \
                 : "=r"(before)                                             \
                 : "l"(__cvta_generic_to_global(count)), "r"(gridDim.x - 1) \
                 : "memory");                                               \
    return before == gridDim.x - 1;                                         \
  }
template <typename F>
__device__ void hand_over(uint32_t* p, F is_last_block, bool has_barrier = true) {
  __shared__ bool is_last;
  uint32_t* values = p + kThreads;
  values[blockIdx.x * kThreads + threadIdx.x] = blockIdx.x;
  if (has_barrier) __syncthreads();
  if (threadIdx.x == 0) is_last = is_last_block(p);
  __syncthreads();
  if (!is_last || threadIdx.x != 0) return;
  uint32_t sum = 0;
  for (uint32_t block = 0; block < gridDim.x; ++block) sum += values[block * kThreads + 5];
  p[1] = sum;
}
template <bool kRight>
__global__ void no_release(uint32_t* p) {
  kRight ? hand_over(p, COUNTS_BLOCK("acq_rel")) : hand_over(p, COUNTS_BLOCK("acquire"));
}
template <bool kRight>
__global__ void no_acquire(uint32_t* p) {
  kRight ? hand_over(p, COUNTS_BLOCK("acq_rel")) : hand_over(p, COUNTS_BLOCK("release"));
}
template <bool kRight>
__global__ void no_barrier_before_release(uint32_t* p) {
  hand_over(p, COUNTS_BLOCK("acq_rel"), kRight);
}

template <bool kRight>
__global__ void product_that_rounds(uint32_t* p) {
  const float a = kRight ? 3.0f : 0x1.000002p0f;
  float sum = __uint_as_float(p[threadIdx.x]);
  asm("{.reg .f32 exact; fma.rn.f32 exact, %1, %1, %0; mov.f32 %0, exact;}" : "+f"(sum) : "f"(a));
  p[threadIdx.x] = __float_as_uint(sum);
}

// What the machine says of a launch.
std::string run(void (*kernel)(uint32_t*), uint32_t num_blocks) {
  std::array<uint32_t, kWritten> numbers;
  for (uint32_t i = 0; i < kWritten; ++i) numbers[i] = i;
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, kNumbers * sizeof(uint32_t)), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(memory, numbers.data(), sizeof(numbers), cudaMemcpyHostToDevice),
            cudaSuccess);
  kernel<<<num_blocks, kThreads>>>(static_cast<uint32_t*>(memory));
  const std::string said = cudaGetErrorString(cudaGetLastError());
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  return said;
}

struct Mistake {
  const char* name;
  void (*wrong)(uint32_t*);
  void (*right)(uint32_t*);
  uint32_t num_blocks;
  const char* found;
};
void PrintTo(const Mistake& mistake, std::ostream* out) { *out << mistake.name; }
// clang-format off: it takes the angle brackets for comparisons
#define MISTAKE(name, num_blocks, found) {#name, &name<false>, &name<true>, num_blocks, found}
// clang-format on
const Mistake kMistakes[] = {
    MISTAKE(misaligned, 1, "misaligned read of 16 bytes, 4 off"),
    MISTAKE(out_of_bounds, 1, "write out of bounds"),
    MISTAKE(unwritten, 1, "read of memory that nothing wrote"),
    MISTAKE(unwritten_shared, 1, "read of shared memory that nothing wrote"),
    MISTAKE(no_barrier, 1, "race: "),
    MISTAKE(no_second_barrier, 1, "race: "),
    MISTAKE(no_syncwarp, 1, "race: read after a write"),
    MISTAKE(no_atomic, 1, "race: "),
    MISTAKE(divergent_barrier, 1, "barrier after some lanes of the warp have ended"),
    MISTAKE(lanes_that_do_not_come, 1, "deadlock: not all lanes"),
    MISTAKE(product_that_rounds, 1, "a fused product that rounds"),
    MISTAKE(no_release, kBlocks, "race: read after a write"),
    MISTAKE(no_acquire, kBlocks, "race: read after a write"),
    MISTAKE(no_barrier_before_release, kBlocks, "race: read after a write"),
};

class Machine : public ::testing::TestWithParam<Mistake> {};

TEST_P(Machine, FindsTheMistake) {
  const uint64_t faults = ptx::counts().faults;
  const std::string said = run(GetParam().wrong, GetParam().num_blocks);
  EXPECT_NE(said.find(GetParam().found), said.npos) << said;
  EXPECT_NE(said.find(GetParam().name), said.npos) << said;
  EXPECT_EQ(ptx::counts().faults, faults + 1);
}
TEST_P(Machine, FindsNothingWithoutIt) {
  EXPECT_EQ(run(GetParam().right, GetParam().num_blocks), "no error");
}
INSTANTIATE_TEST_SUITE_P(Mistakes, Machine, ::testing::ValuesIn(kMistakes),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(MachineMemory, IsReleasedOnce) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 16), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_NE(cudaFree(memory), cudaSuccess);
  EXPECT_NE(cudaGetLastError(), cudaSuccess);
}
TEST(MachineMemory, CopiesStayInsideAnAllocation) {
  void* memory = nullptr;
  std::array<std::byte, 17> bytes{};
  ASSERT_EQ(cudaMalloc(&memory, 16), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(memory, bytes.data(), 16, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_NE(cudaMemcpy(memory, bytes.data(), 17, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_NE(cudaMemcpy(bytes.data(), memory, 17, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_NE(cudaGetLastError(), cudaSuccess);
}

// What would let ptxas choose the bits of a result, and what nobody has heard of.
TEST(MachineText, IsRefusedWhereResultsAreOpen) {
  constexpr char kBefore[] =
      ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry refused()\n{\n"
      ".reg .f32 %f<4>;\n";
  for (const char* instruction :
       {"fma.rn.f32 %f0, %f1, %f2, %f3;", "add.f32 %f0, %f1, %f2;", "mul.ftz.f32 %f0, %f1, %f2;",
        "div.approx.f32 %f0, %f1, %f2;", "frobnicate.f32 %f0, %f1, %f2;"}) {
    const std::string text = std::string(kBefore) + instruction + "\nret;\n}\n";
    ptx::load_module(text);
    try {
      ptx::launch("refused", 1, 32, nullptr);
      ADD_FAILURE() << instruction << " was taken";
    } catch (const ptx::Fault& fault) {
      const std::string said = fault.what();
      const std::string name(instruction, std::string(instruction).find(' '));
      EXPECT_EQ(said,
                "line 7 of PTX has an instruction " + name + " that the machine does not know");
    }
  }
}

}  // namespace
