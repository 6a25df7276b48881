// Gives every file of an archive to a fuzz target: what once was found, or reaches far, as a test
// that needs no fuzzer.
#include <cstdio>

#include "tests/fuzz/target.h"
#include "tests/kernels/archive.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const auto files = gradferry::testing::read_archive(argv[1]);
  for (const auto& [name, bytes] : files) {
    std::printf("%s\n", name.c_str());
    std::fflush(stdout);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  std::printf("%zu files\n", files.size());
  return files.empty() ? 1 : 0;
}
