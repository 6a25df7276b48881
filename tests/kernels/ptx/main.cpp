// Runs tests of kernels on the machine. Options beside those of GoogleTest:
//   --few             few tiles of every kind
//   --races           looks for data races
//   --random[=SEED]   draws what the PTX manual leaves open, such as the order of warps and lanes
//   --resident=N      so many blocks at a time, in turns
//   --blocks=N        grids of at most so many blocks, so that each takes several tiles
//   --far             arrays begin 2^33 elements, and messages nearly 4 GiB, before what is used
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "tests/kernels/cuda/kernels_under_test.h"
#include "tests/kernels/ptx/machine.h"

namespace {

bool few_tiles = false, far_offsets = false;

// Whether the argument is --name or --name=value.
bool is_option(std::string_view argument, std::string_view name, std::string& value) {
  if (!argument.starts_with(name)) return false;
  argument.remove_prefix(name.size());
  if (!argument.empty() && argument[0] != '=') return false;
  value = argument.substr(argument.empty() ? 0 : 1);
  return true;
}

}  // namespace

namespace gradferry::testing {
Effort effort() { return few_tiles ? Effort::kFewTiles : Effort::kSomeTiles; }
bool offsets_are_far() { return far_offsets; }
}  // namespace gradferry::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ptx::Options& options = ptx::options();
  for (int i = 1; i < argc; ++i) {
    std::string value;
    if (is_option(argv[i], "--few", value)) {
      few_tiles = true;
    } else if (is_option(argv[i], "--races", value)) {
      options.races = true;
    } else if (is_option(argv[i], "--random", value)) {
      options.random = true;
      if (!value.empty()) options.seed = std::stoull(value);
    } else if (is_option(argv[i], "--resident", value)) {
      options.resident_blocks = static_cast<uint32_t>(std::stoul(value));
    } else if (is_option(argv[i], "--blocks", value)) {
      options.multiprocessors = static_cast<uint32_t>(std::stoul(value));
    } else if (is_option(argv[i], "--far", value)) {
      far_offsets = true;
    } else {
      std::fprintf(stderr, "%s is no option; the head of main.cpp lists them\n", argv[i]);
      return 2;
    }
  }
  const int result = RUN_ALL_TESTS();
  const ptx::Counts counts = ptx::counts();
  std::printf("%llu launches, %.3g instructions of warps, %llu faults\n",
              static_cast<unsigned long long>(counts.launches), double(counts.instructions),
              static_cast<unsigned long long>(counts.faults));
  return result;
}
