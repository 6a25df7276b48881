// The kernels that the tests of this folder run, called with host memory.
#pragma once

#include "gradferry/device_library.h"

namespace gradferry::testing {

const DeviceLibrary& kernels_under_test();

// How many tiles tests go through: all on a GPU; fewer of every kind where the machine of
// tests/kernels/ptx takes a million times as long; the fewest that are worth a test.
enum class Effort : uint8_t { kFewTiles, kSomeTiles, kAllTiles };
Effort effort();

// Whether arrays begin 2^33 elements, and messages nearly 4 GiB, before what is used of them.
bool offsets_are_far();

}  // namespace gradferry::testing
