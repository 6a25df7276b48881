#include "tests/fuzz/target.h"

// NOLINTNEXTLINE(readability-identifier-naming): libFuzzer's name
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool kReady = [] {
    testing::GTEST_FLAG(throw_on_failure) = true;
    return true;
  }();
  (void)kReady;
  gradferry::fuzzing::run({data, size});
  return 0;
}
