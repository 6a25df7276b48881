// 64-bit hashes of a model's parameters, for finding out whether ranks still train the same model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "layout.h"

namespace gradferry {

// Of `num_bytes` bytes, read eight at a time: two inputs of one length that differ in a single
// eight always differ in their hash, others by chance in all but one of 2^64 cases.
uint64_t hash64(const void* data, uint64_t num_bytes);

// Throws Error(kDiverged) naming the first parameter whose hash differs from rank 0's.
void expect_equal_hashes(const std::vector<std::vector<uint64_t>>& by_rank, const Layout& layout,
                         uint64_t step);

class ParameterHashes {
 public:
  // In the order of the engine's layout. Held weakly: the model owns its parameters.
  explicit ParameterHashes(const std::vector<at::Tensor>& parameters);

  // Of the parameters' bits as they are now, in the order of memory; 0 for one that is gone. On a
  // device: as they are behind the current stream, for which it waits.
  std::vector<uint64_t> compute() const;
  // A number that changes when torch writes to a parameter in place; some fused kernels and what
  // goes through .data are not seen.
  uint64_t writes() const;

 private:
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> parameters_;
};

}  // namespace gradferry
