#include "parameter_hashes.h"

#include <cstring>

#include "gradferry/error.h"

namespace gradferry {
namespace {

constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio
constexpr uint64_t kLanes = 4;                 // so that multiplications overlap

// Bijective in `state` for every word, and in `word` for every state.
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

void expect_equal_hashes(const std::vector<std::vector<uint64_t>>& by_rank, const Layout& layout,
                         uint64_t step) {
  for (size_t index = 0; index < layout.parameters().size(); ++index) {
    for (size_t rank = 1; rank < by_rank.size(); ++rank) {
      GRADFERRY_EXPECTS(
          by_rank[rank][index] == by_rank[0][index], kDiverged,
          "parameter '" + layout.parameters()[index].name + "' of rank " + std::to_string(rank) +
              " differs from that of rank 0 at step " + std::to_string(step) +
              ", and may not be the only one; look for updates, clipping or random numbers that "
              "differ between ranks, then go on from a checkpoint that is older than this");
    }
  }
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
    // Ranks agreed on strides at attach, so the memory order is the same on all ranks.
    const at::Tensor dense =
        parameter.is_non_overlapping_and_dense() ? parameter : parameter.contiguous();
    const at::Tensor on_host = dense.cpu();
    hashes.push_back(hash64(on_host.const_data_ptr(), on_host.nbytes()));
  }
  return hashes;
}

uint64_t ParameterHashes::writes() const {
  uint64_t writes = 0;
  for (const auto& weak : parameters_) {
    if (const auto locked = weak.lock()) writes += locked->version_counter().current_version();
  }
  return writes;
}

}  // namespace gradferry
