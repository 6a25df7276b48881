// Loads every kernel that an engine may need.
#pragma once

#include "device/device_context.h"

namespace gradferry {

// Runs each kernel once, on one element, on F, and waits. The first launch of a kernel may load it,
// and loading may wait for the device, which must not happen in a backward pass.
void load_kernels(const DeviceContext& context);

}  // namespace gradferry
