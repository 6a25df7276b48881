// Which parameters a rank used in a pass, for DDP with find_unused_parameters. DDP hands over the
// .grad that is there for all others as well, and that of a parameter that no rank used is to stay
// as it is. No rank knows that before it has heard from all: so it keeps a copy of what the
// exchange changes of those that it did not use, tells the others with the bucket's commit which it
// did, and puts the copy back where nobody did.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "layout.h"

namespace gradferry {

// By parameter of a bucket, in bucket order: not 0 where it was used.
using UsedMap = std::vector<uint8_t>;

// Bytes of a map on its way: one for each parameter, and zeros up to a multiple of 8.
uint64_t used_map_bytes(size_t num_parameters);

// Finds the parameters whose gradients were accumulated, as DDP itself does: by a hook on the
// accumulation, which runs before DDP hands over the bucket. Passes under no_sync() count.
class UsedParameters {
 public:
  // From now on, for as long as DDP keeps the nodes that accumulate gradients. `used`: by
  // parameter, since the last synced pass.
  UsedParameters(const std::vector<at::Tensor>& parameters, const UsedMap& used);

  // Whether each was used since it was asked for last.
  UsedMap take(const std::vector<uint32_t>& parameters) const;

 private:
  using Flags = std::vector<std::atomic<bool>>;  // by parameter
  std::shared_ptr<Flags> flags_;
};

// What the exchange may change of the parameters that this rank did not use: their elements of the
// bucket, and this rank's residuals.
class UnusedCopy {
 public:
  UnusedCopy() = default;
  // Work of the current stream. `worker` and `owner` are the residuals; undefined: not touched.
  UnusedCopy(const Layout& layout, const std::vector<uint32_t>& parameters, const UsedMap& used,
             const at::Tensor& gradient, const at::Tensor& worker, const at::Tensor& owner);

  // Where no rank used a parameter: its elements as they were, to the bit, and residuals times
  // `gain`, as of a gradient of zeros. `used` is of all ranks together.
  void put_back(const UsedMap& used, float gain) const;

 private:
  struct Part {
    size_t position;  // of the parameter in the bucket
    at::Tensor now;   // a view of what may change
    at::Tensor before;
    bool residual;
  };
  void keep(size_t position, const at::Tensor& whole, uint64_t offset, uint64_t num_elements,
            bool residual);

  std::vector<Part> parts_;
};

}  // namespace gradferry
