#include "measure/core_rate.h"

#include "measure/pass_times.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradferry {
namespace {

// Enough independent chains to keep all units busy, few enough to stay in registers.
constexpr int kChains = 10;
constexpr int kSteps = 4096;
constexpr float kFactor = 0.999F, kSummand = 0.001F;  // from 1 the numbers go nowhere

#if defined(__x86_64__)
constexpr int kFusedLanes = 8;
__attribute__((target("avx2,fma"))) float fused_chains() {
  __m256 x[kChains];
  for (__m256& chain : x) chain = _mm256_set1_ps(1.0F);
  const __m256 factor = _mm256_set1_ps(kFactor), summand = _mm256_set1_ps(kSummand);
  for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 10
    for (__m256& chain : x) chain = _mm256_fmadd_ps(chain, factor, summand);
  }
  float sum = 0;
  for (const __m256& chain : x) sum += _mm256_cvtss_f32(chain);
  return sum;
}
bool has_fused() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
constexpr int kFusedLanes = 1;
float fused_chains() { return 0; }
bool has_fused() { return false; }
#endif

float plain_chains() {
  float x[kChains];
  for (float& chain : x) chain = 1.0F;
  for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 10
    for (float& chain : x) chain = chain * kFactor + kSummand;
  }
  float sum = 0;
  for (const float chain : x) sum += chain;
  return sum;
}

}  // namespace

double multiply_adds_per_second() {
  static const bool fused = has_fused();
  volatile float used = 0;  // so that it is computed
  const double seconds = seconds_of([&] { used = fused ? fused_chains() : plain_chains(); });
  return static_cast<double>(kChains) * kSteps * (fused ? kFusedLanes : 1) / seconds;
}

}  // namespace gradferry
