// Runs tests of kernels on the machine. Options beside those of GoogleTest:
//   --few             few tiles of every kind
//   --races           looks for data races
//   --random[=SEED]   draws what the PTX manual leaves open, such as the order of warps and lanes
//   --resident=N      so many blocks at a time, in turns
//   --far             arrays begin 2^33 elements, and messages nearly 4 GiB, before what is used
//   --without=WHAT    takes a part out of what the last block of a launch waits for: "release" and
//                     "acquire", the fences before and behind its count, or "barrier", before these
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "tests/kernels/cuda/kernels_under_test.h"
#include "tests/kernels/ptx/machine.h"

namespace {

bool few_tiles = false, far_offsets = false;
std::string left_out;

// Empties the last of the twelve lines before `end` that says `what`.
void remove_before(std::vector<std::string>& lines, size_t end, const char* what) {
  for (size_t i = end - 1; i + 12 >= end; --i) {
    if (lines[i].find(what) == std::string::npos) continue;
    lines[i].clear();
    return;
  }
}

std::string leave_out(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].find("atom.global.inc") == std::string::npos) continue;
    if (left_out == "release") remove_before(lines, i, "membar.gl");
    if (left_out == "barrier") remove_before(lines, i, "bar.sync");
    if (left_out != "acquire") continue;
    for (size_t k = i + 1; k < lines.size() && k < i + 6; ++k) {
      if (lines[k].find("membar.gl") != std::string::npos) lines[k].clear();
    }
  }
  std::string result;
  for (const std::string& line : lines) result += line + '\n';
  return result;
}

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
    } else if (is_option(argv[i], "--far", value)) {
      far_offsets = true;
    } else if (is_option(argv[i], "--without", left_out)) {
      options.edit = &leave_out;
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
