// What every fuzz target includes. A target is one file that defines run(); its checks are
// those of GoogleTest and throw where they fail, which ends a fuzzer and a replay alike.
#pragma once

#include <gtest/gtest.h>

#include "tests/fuzz/bytes.h"

namespace gradferry::fuzzing {

void run(Bytes input);

}  // namespace gradferry::fuzzing

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
