#include "parameter_hashes.h"

#include <algorithm>
#include <iterator>

#include "gradferry/error.h"
#include "hash64.h"

namespace gradferry {
void expect_equal_hashes(const std::vector<std::vector<uint64_t>>& by_rank, const Layout& layout,
                         uint64_t step, const Peers& peers) {
  for (size_t index = 0; index < layout.parameters().size(); ++index) {
    std::vector<uint64_t> hashes;
    for (const auto& row : by_rank) hashes.push_back(row[index]);
    const auto count = [&](uint64_t hash) { return std::ranges::count(hashes, hash); };
    if (count(hashes[0]) == std::ssize(hashes)) continue;
    const auto usual = std::ranges::max_element(hashes, {}, count);
    const auto odd = std::ranges::find_if(hashes, [&](uint64_t hash) { return hash != *usual; });
    const auto name_of = [&](auto found) {
      return name_ranks({peers.in_world(static_cast<uint32_t>(found - hashes.begin()))});
    };
    throw Error(ErrorKind::kDiverged,
                "parameter '" + layout.parameters()[index].name + "' of " + name_of(odd) +
                    " differs from that of " + name_of(usual) + " at step " + std::to_string(step) +
                    ", and may not be the only one; look for updates, clipping or random numbers "
                    "that differ between ranks, then go on from a checkpoint that is older than "
                    "this");
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

}  // namespace gradferry
