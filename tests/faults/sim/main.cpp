// Worlds: `gradferry_sim --worlds 20000`, or gradferry_threads. See README.md.
#include <ATen/Parallel.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "tests/faults/sim/campaign.h"

namespace {

constexpr const char* kUsage =
    "usage: gradferry_sim [--worlds N] [--first SEED] [--jobs N]   play worlds SEED to SEED + N - "
    "1\n"
    "       gradferry_sim --choices 1,0,2,...                      play one world, and print it\n"
    "Every world is drawn from its seed. One in which something does not hold is made as small as\n"
    "it can be in 3000 or --tries tries, and printed with its choices, which play it again.\n"
    "gradferry_threads plays them on real threads and sockets, without mishaps of messages.\n";

[[noreturn]] void refuse(const char* argument) {
  std::fprintf(stderr, "gradferry_sim: '%s' is not understood\n%s", argument, kUsage);
  std::exit(2);
}

uint64_t number(const char* text) {
  uint64_t value = 0;
  if (text == nullptr) refuse("the end");
  const char* end = text + std::strlen(text);
  if (std::from_chars(text, end, value).ptr != end) refuse(text);
  return value;
}

std::vector<uint32_t> numbers(const char* text) {
  std::vector<uint32_t> values;
  if (text == nullptr) refuse("the end");
  for (const char* end = text + std::strlen(text); text < end; ++text) {
    uint32_t value = 0;
    const char* next = std::from_chars(text, end, value).ptr;
    if (next == text || (next != end && *next != ',')) refuse(text);
    values.push_back(value);
    text = next;
  }
  return values;
}

}  // namespace

int main(int argc, char** argv) {
  // The environment says it to threads that torch does not know as well (gradferry_threads).
  if (std::getenv("OMP_NUM_THREADS") == nullptr) at::set_num_threads(1);
  gradferry::sim::Campaign campaign;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view option = argv[i];
    const char* value = argv[i + 1];  // null behind the last
    if (option == "--help") {
      std::fputs(kUsage, stdout);
      return 0;
    }
    if (option == "--worlds") {
      campaign.worlds = number(value);
    } else if (option == "--first") {
      campaign.first = number(value);
    } else if (option == "--jobs") {
      campaign.jobs = number(value);
    } else if (option == "--tries") {
      campaign.tries = number(value);
    } else if (option == "--choices") {
      return gradferry::sim::play_again(numbers(value)) ? 0 : 1;
    } else {
      refuse(argv[i]);
    }
  }
  return gradferry::sim::play_all(campaign) ? 0 : 1;
}
