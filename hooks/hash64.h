// The hash of a parameter's bits in checks of parameters; docs/reference/wire_format.md defines it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gradferry {

// Bijective in `state` for every word, and in `word` for every state.
inline uint64_t hash_mix(uint64_t state, uint64_t word) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio
  state = (state ^ word) * kOdd;
  return state ^ (state >> 32);
}

// Hash of `num_bytes` bytes in host memory, read in words of eight bytes. Two inputs of the same
// length that differ in one word always have different hashes; other different inputs have equal
// hashes with probability 2^-64.
inline uint64_t hash64(const void* data, uint64_t num_bytes) {
  constexpr uint64_t kLanes = 4;  // so that multiplications overlap
  const auto* bytes = static_cast<const std::byte*>(data);
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  uint64_t i = 0;
  for (; i + kLanes * 8 <= num_bytes; i += kLanes * 8) {
    uint64_t words[kLanes];
    std::memcpy(words, bytes + i, sizeof(words));
    for (uint64_t l = 0; l < kLanes; ++l) lanes[l] = hash_mix(lanes[l], words[l]);
  }
  uint64_t hash = hash_mix(0, num_bytes);
  for (; i < num_bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, num_bytes - i < 8 ? num_bytes - i : 8);
    hash = hash_mix(hash, word);
  }
  for (const uint64_t lane : lanes) hash = hash_mix(hash, lane);
  return hash;
}

}  // namespace gradferry
