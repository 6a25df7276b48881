// The fake device's kernels: the calls of tests/kernels/host_library.h, which leave the bytes of
// the CUDA kernels, enqueued on its streams, each saying what it reads and writes.
#pragma once

#include "gradferry/device_library.h"

namespace fake_device {

const gradferry::DeviceLibrary& device_library();
// From now on all streams say that they are captured, or that they are not.
void set_capturing(bool now);

}  // namespace fake_device
