// 64-bit hashes of a model's parameters, to check that all ranks still have the same model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "peers.h"
#include "protocol/layout.h"

namespace gradferry {

// Throws Error(kDiverged) naming the first parameter whose hashes differ, and the first rank whose
// hash most others do not have.
void expect_equal_hashes(const std::vector<std::vector<uint64_t>>& by_rank, const Layout& layout,
                         uint64_t step, const Peers& peers);

class ParameterHashes {
 public:
  // In the order of the engine's layout. Held weakly: the model owns its parameters.
  explicit ParameterHashes(const std::vector<at::Tensor>& parameters);

  // Hashes of the parameters' bits, in memory order; 0 for a parameter that was freed. On a device
  // it waits for the current stream and hashes the state after it: on the host, since the check is
  // rare, the step needs its result, and all devices so have one hash function.
  std::vector<uint64_t> compute() const;

 private:
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> parameters_;
};

}  // namespace gradferry
