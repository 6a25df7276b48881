// CUDA's built-ins for kernels that are compiled for the CPU: what kernels/common/cuda.h includes
// in place of <cuda_runtime.h>. One-dimensional grids, static shared memory, no dynamic
// parallelism.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "tests/kernels/simt/machine.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

namespace simt {
struct Index {
  uint32_t x = 0;
};
}  // namespace simt

extern simt::Index threadIdx, blockIdx, blockDim, gridDim;

// --- barriers ------------------------------------------------------------------------------------
inline void __syncthreads(const simt::Where& where = simt::Where::current()) {
  simt::barrier(simt::BarrierOp::kSync, 0, where);
}
inline int __syncthreads_or(int predicate, const simt::Where& where = simt::Where::current()) {
  return simt::barrier(simt::BarrierOp::kOr, predicate, where);
}
inline int __syncthreads_and(int predicate, const simt::Where& where = simt::Where::current()) {
  return simt::barrier(simt::BarrierOp::kAnd, predicate, where);
}
inline int __syncthreads_count(int predicate, const simt::Where& where = simt::Where::current()) {
  return simt::barrier(simt::BarrierOp::kCount, predicate, where);
}

// --- warps ---------------------------------------------------------------------------------------
inline void __syncwarp(uint32_t mask = 0xffffffffu,
                       const simt::Where& where = simt::Where::current()) {
  simt::meet(simt::WarpOp::kSync, mask, 0, 0, where);
}

namespace simt {
template <typename T>
T shuffle(uint32_t mask, T value, uint32_t source, const Where& where) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = meet(WarpOp::kShuffle, mask, bits, source, where);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
inline uint32_t lane() { return threadIdx.x % kWarpSize; }
}  // namespace simt

template <typename T>
T __shfl_sync(uint32_t mask, T value, int source,
              const simt::Where& where = simt::Where::current()) {
  return simt::shuffle(mask, value, static_cast<uint32_t>(source) % simt::kWarpSize, where);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lanes,
                  const simt::Where& where = simt::Where::current()) {
  return simt::shuffle(mask, value, simt::lane() ^ static_cast<uint32_t>(lanes), where);
}
// Lanes without a source keep their own value.
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta,
                 const simt::Where& where = simt::Where::current()) {
  const uint32_t lane = simt::lane();
  return simt::shuffle(mask, value, lane < delta ? lane : lane - delta, where);
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta,
                   const simt::Where& where = simt::Where::current()) {
  const uint32_t lane = simt::lane(), source = lane + delta;
  return simt::shuffle(mask, value, source < simt::kWarpSize ? source : lane, where);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate,
                              const simt::Where& where = simt::Where::current()) {
  return static_cast<uint32_t>(simt::meet(simt::WarpOp::kBallot, mask, predicate != 0, 0, where));
}
inline int __any_sync(uint32_t mask, int predicate,
                      const simt::Where& where = simt::Where::current()) {
  return static_cast<int>(simt::meet(simt::WarpOp::kAny, mask, predicate != 0, 0, where));
}
inline int __all_sync(uint32_t mask, int predicate,
                      const simt::Where& where = simt::Where::current()) {
  return static_cast<int>(simt::meet(simt::WarpOp::kAll, mask, predicate != 0, 0, where));
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t value,
                                  const simt::Where& where = simt::Where::current()) {
  return static_cast<uint32_t>(simt::meet(simt::WarpOp::kAdd, mask, value, 0, where));
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value,
                                  const simt::Where& where = simt::Where::current()) {
  return static_cast<uint32_t>(simt::meet(simt::WarpOp::kMaximum, mask, value, 0, where));
}
inline uint32_t __reduce_min_sync(uint32_t mask, uint32_t value,
                                  const simt::Where& where = simt::Where::current()) {
  return static_cast<uint32_t>(simt::meet(simt::WarpOp::kMinimum, mask, value, 0, where));
}
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t value,
                                 const simt::Where& where = simt::Where::current()) {
  return static_cast<uint32_t>(simt::meet(simt::WarpOp::kOr, mask, value, 0, where));
}

// --- atomics: whole by nature here, and known as atomic to ThreadSanitizer -----------------------
inline void __threadfence() { simt::fence(); }
inline uint32_t atomicAdd(uint32_t* address, uint32_t value) {
  simt::note_atomic(address);
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  simt::note_atomic(address);
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline uint32_t atomicOr(uint32_t* address, uint32_t value) {
  simt::note_atomic(address);
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
// Counts from 0 to `last` and begins again.
inline uint32_t atomicInc(uint32_t* address, uint32_t last) {
  simt::note_atomic(address);
  uint32_t old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, old >= last ? 0 : old + 1, false,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

// --- conversions: what PTX says of the instructions of these names
// --------------------------------
//
// By the compiler's own half-precision type, and so apart from the kernels' arithmetic.
namespace simt {
inline uint32_t cvt_rn_f16(float x) {
  const auto half = static_cast<_Float16>(x);
  uint16_t bits;
  __builtin_memcpy(&bits, &half, sizeof(bits));
  return x != x ? 0x7fff : bits;
}
inline uint32_t cvt_rn_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  const uint32_t cut = bits & 0xffff, half = 0x8000;
  const bool up = cut > half || (cut == half && (bits >> 16 & 1) != 0);
  return x != x ? 0x7fff : (bits >> 16) + (up ? 1 : 0);
}
inline uint32_t cvt_rn_f16x2(float high, float low) {
  return cvt_rn_f16(high) << 16 | cvt_rn_f16(low);
}
inline uint32_t cvt_rn_bf16x2(float high, float low) {
  return cvt_rn_bf16(high) << 16 | cvt_rn_bf16(low);
}
inline float cvt_f32_f16(uint32_t bits) {
  const auto narrow = static_cast<uint16_t>(bits);
  _Float16 half;
  __builtin_memcpy(&half, &narrow, sizeof(half));
  constexpr uint32_t kNan = 0x7fffffffu;
  float result = static_cast<float>(half);
  if (result != result) __builtin_memcpy(&result, &kNan, sizeof(result));
  return result;
}
}  // namespace simt

// --- bits ----------------------------------------------------------------------------------------
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(x)); }
// Each of the four low nibbles of `selector` picks a byte of b:a.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t chosen = selector >> (4 * i) & 7;
    result |= static_cast<uint32_t>(bytes >> (8 * chosen) & 255) << (8 * i);
  }
  return result;
}

namespace simt {

// Static shared memory of a kernel, entered by a thread.
template <typename T>
T& shared_memory(T& memory, const Where& where = Where::current()) {
  static_assert(std::is_trivial_v<T>, "shared memory holds trivial types");
  return *static_cast<T*>(enter_shared_memory(&memory, sizeof(T), where));
}

// The kernel's name, out of "... [with auto kKernel = NAME; ..." or "...; kKernel = NAME]".
constexpr std::string_view kernel_name(std::string_view function) {
  const size_t begin = function.find("kKernel = ") + 10;
  return function.substr(begin, function.find_first_of(";]", begin) - begin);
}

template <typename Body>
void launch(std::string_view function, uint32_t num_blocks, uint32_t num_threads, Body body) {
  static thread_local char name[256];
  const std::string_view kernel = kernel_name(function);
  const size_t length = kernel.size() < sizeof(name) - 1 ? kernel.size() : sizeof(name) - 1;
  std::memcpy(name, kernel.data(), length);
  name[length] = '\0';
  run(name, num_blocks, num_threads, [](void* f) { (*static_cast<Body*>(f))(); }, &body);
}

}  // namespace simt
