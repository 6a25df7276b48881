// What kernels compute, on the host: every function of a DeviceLibrary by the codecs of the CPU and
// the definitions of include/gradferry/wire.h, in the caller's thread, before the call returns.
// Kernels must leave the same bytes. Pointers are to host memory.
#pragma once

#include "gradferry/device_library.h"

namespace gradferry::testing {

const DeviceLibrary& host_library();

}  // namespace gradferry::testing
