// Which parameters a rank used in a pass, for DDP with find_unused_parameters. A bucket also holds
// the old .grad of unused parameters, and if no rank used a parameter, its .grad must not change. A
// rank knows this only after it has heard from all others. So it copies the elements and residuals
// of the parameters that it did not use, sends with the bucket's commit which ones it did use, and
// restores the copy of parameters that no rank used.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "protocol/layout.h"
#include "protocol/used_map.h"

namespace gradferry {

// Finds the parameters whose gradients were accumulated, as DDP itself does: by a hook on the
// accumulation, which runs before DDP calls the hook for the bucket. Passes under no_sync() count.
class UsedParameters {
 public:
  // Watches from now on, for as long as DDP keeps the nodes that accumulate gradients. `used`: for
  // each parameter, whether it was already used since the last synced pass.
  UsedParameters(const std::vector<at::Tensor>& parameters, const UsedMap& used);

  // Whether each parameter was used since the last call for it.
  UsedMap take(const std::vector<uint32_t>& parameters) const;

 private:
  using Flags = std::vector<std::atomic<bool>>;  // by parameter
  std::shared_ptr<Flags> flags_;
};

// A copy of what the exchange may change for the parameters that this rank did not use: their
// elements in the bucket, and this rank's residuals.
class UnusedCopy {
 public:
  UnusedCopy() = default;
  // Copies on the current stream. `worker` and `owner` are the residuals; undefined: not copied.
  UnusedCopy(const Layout& layout, const std::vector<uint32_t>& parameters, const UsedMap& used,
             const at::Tensor& gradient, const at::Tensor& worker, const at::Tensor& owner);

  // Where no rank used a parameter: restores its elements and residuals, to the bit. `used`
  // combines all ranks.
  void put_back(const UsedMap& used) const;

 private:
  struct CopiedPart {
    size_t position;  // of the parameter in the bucket
    at::Tensor now;   // a view of what may change
    at::Tensor before;
  };
  void keep(size_t position, const at::Tensor& whole, uint64_t offset, uint64_t num_elements);

  std::vector<CopiedPart> parts_;
};

}  // namespace gradferry
