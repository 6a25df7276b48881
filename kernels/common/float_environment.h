// The floating-point modes the wire format demands, for the duration of a call.
#pragma once

#include <cstdint>

#include "kernels/common/lane.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Round to nearest even, gradual underflow, exceptions masked. Callers may have set flush-to-zero
// (torch.set_flush_denormal does, per thread); their modes and flags come back at the end.
//
// Compilers move arithmetic across these writes freely: the work in between must be a call of a
// function that is not inlined.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  GRADFERRY_LANE FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u); }
  GRADFERRY_LANE ~FloatEnvironment() { _mm_setcsr(saved_); }

 private:
  uint32_t saved_;
#elif defined(__aarch64__)
  GRADFERRY_LANE FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}) : "memory");
  }
  GRADFERRY_LANE ~FloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_) : "memory"); }

 private:
  uint64_t saved_;
#else
  GRADFERRY_LANE FloatEnvironment() {}
  GRADFERRY_LANE ~FloatEnvironment() {}
#endif

 public:
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
