#include "parameter_hashes.h"

#include <cstring>

namespace gradferry {
namespace {

constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio
constexpr uint64_t kLanes = 4;                 // so that multiplications overlap

// One to one in `state` for every word, and in `word` for every state.
uint64_t mix(uint64_t state, uint64_t word) {
  state = (state ^ word) * kOdd;
  return state ^ (state >> 32);
}

}  // namespace

uint64_t hash64(const void* data, uint64_t num_bytes) {
  const auto* bytes = static_cast<const std::byte*>(data);
  uint64_t lanes[kLanes] = {1, 2, 3, 4};
  uint64_t i = 0;
  for (; i + kLanes * 8 <= num_bytes; i += kLanes * 8) {
    uint64_t words[kLanes];
    std::memcpy(words, bytes + i, sizeof(words));
    for (uint64_t l = 0; l < kLanes; ++l) lanes[l] = mix(lanes[l], words[l]);
  }
  uint64_t hash = mix(0, num_bytes);
  for (; i < num_bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, num_bytes - i < 8 ? num_bytes - i : 8);
    hash = mix(hash, word);
  }
  for (const uint64_t lane : lanes) hash = mix(hash, lane);
  return hash;
}

ParameterHashes::ParameterHashes(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    parameters_.emplace_back(parameter.getIntrusivePtr());
  }
}

std::vector<uint64_t> ParameterHashes::compute() const {
  std::vector<uint64_t> hashes;
  for (const auto& weak : parameters_) {
    const auto locked = weak.lock();
    if (!locked) {
      hashes.push_back(0);
      continue;
    }
    const at::Tensor parameter(locked);
    // Strides were agreed at attach, so the order of memory is the same on all ranks.
    const at::Tensor dense =
        parameter.is_non_overlapping_and_dense() ? parameter : parameter.contiguous();
    hashes.push_back(hash64(dense.const_data_ptr(), dense.nbytes()));
  }
  return hashes;
}

}  // namespace gradferry
