// Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011): a bijection of 128-bit counters for each 64-bit key.
// Templated on the vector type, see lane.h: a vector holds the same word of several counters.
#pragma once

#include "kernels/common/lane.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

template <typename U>
struct PhiloxCounter {
  U word[4];  // least significant first
};

template <typename U>
GRADFERRY_LANE PhiloxCounter<U> philox(PhiloxCounter<U> counter, uint64_t key) {
  const U multiplier0(0xd2511f53u), multiplier1(0xcd9e8d57u);
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const auto& c = counter.word;
    const U high0 = multiply_high(multiplier0, c[0]), low0 = multiplier0 * c[0];
    const U high1 = multiply_high(multiplier1, c[2]), low1 = multiplier1 * c[2];
    counter = {{high1 ^ c[1] ^ U(key0), low1, high0 ^ c[3] ^ U(key1), low0}};
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return counter;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
