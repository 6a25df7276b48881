// The fake device's kernels: the codecs of the CPU and the message kernels of the emulator,
// enqueued on its streams, each saying what it reads and writes.
#pragma once

#include "gradferry/device_library.h"

namespace fake_device {

const gradferry::DeviceLibrary& device_library();

}  // namespace fake_device
