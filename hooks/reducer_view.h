// What DDP's Reducer knows and shows only to derived classes. Names and types are those of every
// torch that is supported.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "used_parameters.h"

namespace c10d {
class Reducer;
}

namespace gradferry {

// Those that DDP took when it was built. Its public functions tell the parameters of buckets, and
// only of buckets that have their memory.
std::vector<at::Tensor> reducer_parameters(const c10d::Reducer& reducer);

// Whether each of `parameters`, all of them the reducer's, was used since the last synced pass, as
// under no_sync().
UsedMap used_since_last_sync(const c10d::Reducer& reducer,
                             const std::vector<at::Tensor>& parameters);

// Parameters whose gradients the buckets that are there hold in another order: their memory format
// has changed since. DDP writes gradients to a bucket in the old order and reads them in the new.
std::vector<at::Tensor> reordered_since_buckets_were_made(const c10d::Reducer& reducer);

}  // namespace gradferry
