// Access to protected members of DDP's Reducer. Their names and types are the same in every
// supported version of torch; a change of their type is a compile error.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "used_parameters.h"

namespace c10d {
class Reducer;
}

namespace gradferry {

// The parameters that DDP reduces, fixed when it was built. Its public functions give only those of
// buckets that have memory.
std::vector<at::Tensor> reducer_parameters(const c10d::Reducer& reducer);

// For each of `parameters`, which must be the reducer's, whether it was used since the last synced
// pass, for example under no_sync().
UsedMap used_since_last_sync(const c10d::Reducer& reducer,
                             const std::vector<at::Tensor>& parameters);

// Parameters whose memory format has changed since the present buckets were made. DDP writes their
// gradients to a bucket in the old element order and reads them in the new one.
std::vector<at::Tensor> reordered_since_buckets_were_made(const c10d::Reducer& reducer);
// Parameters that have since moved to another device than their bucket's.
std::vector<at::Tensor> moved_since_buckets_were_made(const c10d::Reducer& reducer);

}  // namespace gradferry
