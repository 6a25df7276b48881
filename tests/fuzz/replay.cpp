// Gives every file of an archive to a fuzz target, and random bytes: what once was found, or
// reaches far, and a property test of the target's promise, that need no fuzzer.
#include <cstdio>
#include <random>
#include <string>

#include "tests/fuzz/target.h"
#include "tests/kernels/archive.h"

namespace {

void play(const std::string& name, const std::string& bytes) {
  std::printf("%s\n", name.c_str());
  std::fflush(stdout);
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto files = gradferry::testing::read_archive(argv[1]);
  for (const auto& [name, bytes] : files) play(name, bytes);
  const uint64_t num_random = std::stoull(argv[2]);
  for (uint64_t seed = 0; seed < num_random; ++seed) {
    std::mt19937_64 random(seed);
    std::string bytes(random() % 512, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    play("seed " + std::to_string(seed), bytes);
  }
  std::printf("%zu files\n", files.size());
  return files.empty() ? 1 : 0;
}
