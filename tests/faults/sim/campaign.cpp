#include "tests/faults/sim/campaign.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>
#include <optional>

#include "tests/faults/sim/scenario.h"
#include "tests/faults/sim/scheduler.h"

namespace gradferry::sim {
namespace {

// A process plays so many worlds, then another takes over: killed ranks leave what they held.
constexpr uint64_t kWorldsPerProcess = 500;

// What a process that plays worlds tells the one that started it, in memory that both have. It
// stands there also after a crash.
struct Report {
  uint64_t seed;  // under way
  uint64_t played, went_wrong, ended_in_error, resumed;
  bool failed;
  char failure[1000];
};

Report* make_report() {
  void* memory =
      mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return new (memory) Report{};
}

void note_failure(Report& report, const std::string& what) {
  report.failed = true;
  std::snprintf(report.failure, sizeof(report.failure), "%s", what.c_str());
}

// Plays one world into the report. Returns whether all held.
bool play_one(Choices choices, Report& report) {
  try {
    const Came came = check_world(World::draw(choices));
    ++report.played;
    report.went_wrong += came.went_wrong;
    report.ended_in_error += came.ended_in_error;
    report.resumed += came.resumed;
    return true;
  } catch (const std::exception& error) {
    note_failure(report, error.what());
    return false;
  }
}

pid_t start_process(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("cannot fork");
  if (child == 0) {
    body();
    _exit(0);
  }
  return child;
}

void note_crash(Report& report, int status) {
  if (!report.failed && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) {
    const int number = WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
    note_failure(report, std::string(WIFSIGNALED(status) ? "the process ended by signal "
                                                         : "the process ended with ") +
                             std::to_string(number));
  }
}

// Why a world fails, played in a process of its own; nothing: it does not.
std::optional<std::string> failure_of(const std::vector<uint32_t>& choices) {
  Report* report = make_report();
  const pid_t child = start_process([&] { play_one(Choices(choices), *report); });
  int status = 0;
  waitpid(child, &status, 0);
  note_crash(*report, status);
  std::optional<std::string> failure;
  if (report->failed) failure = report->failure;
  munmap(report, sizeof(Report));
  return failure;
}

// What kind of failure it is: how its text begins, without numbers.
std::string kind_of(std::string failure) {
  constexpr size_t kBeginning = 40;
  std::erase_if(failure, [](char c) { return c >= '0' && c <= '9'; });
  return failure.substr(0, kBeginning);
}

// Smaller choices for as long as the world still fails in that way.
std::vector<uint32_t> shrink(std::vector<uint32_t> choices, const std::string& failure,
                             uint64_t most_tries) {
  uint64_t tries = 0;
  const auto accept = [&](std::vector<uint32_t> smaller) {
    if (smaller == choices || tries++ >= most_tries) return false;
    const auto other = failure_of(smaller);
    if (!other || kind_of(*other) != kind_of(failure)) return false;
    choices = std::move(smaller);
    return true;
  };
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (size_t width = 8; width > 0; width /= 2) {
      for (size_t i = 0; i + width <= choices.size(); ++i) {
        auto without = choices;
        without.erase(without.begin() + static_cast<ptrdiff_t>(i),
                      without.begin() + static_cast<ptrdiff_t>(i + width));
        if (accept(std::move(without))) smaller = true;
      }
    }
    for (size_t i = 0; i < choices.size(); ++i) {
      for (const uint32_t value : {0U, choices[i] / 2, choices[i] - 1}) {
        if (value >= choices[i]) continue;
        auto lower = choices;
        lower[i] = value;
        if (accept(std::move(lower))) {
          smaller = true;
          break;
        }
      }
    }
  }
  while (!choices.empty() && choices.back() == 0) choices.pop_back();
  return choices;
}

void print_failure(uint64_t seed, uint64_t most_tries) {
  Choices drawn(seed);
  World::draw(drawn);
  const auto as_drawn = failure_of(drawn.made());
  if (!as_drawn) {
    std::printf("world %lu: fails only now and then, or after other worlds in the same process\n",
                seed);
    return;
  }
  std::printf("world %lu: %s\nmaking it smaller ...\n", seed, as_drawn->c_str());
  std::fflush(stdout);
  const std::vector<uint32_t> choices = shrink(drawn.made(), *as_drawn, most_tries);
  Choices again(choices);
  const World world = World::draw(again);
  std::printf("%s\n%s\nagain: %s --choices ", failure_of(choices).value_or("").c_str(),
              world.text().c_str(), program_invocation_short_name);
  for (size_t i = 0; i < choices.size(); ++i) std::printf(i == 0 ? "%u" : ",%u", choices[i]);
  std::printf("%s\n", choices.empty() ? "0" : "");
}

}  // namespace

bool play_all(const Campaign& campaign) {
  const uint64_t end = campaign.first + campaign.worlds;
  const uint64_t share =
      std::clamp(campaign.worlds / campaign.jobs, uint64_t{1}, kWorldsPerProcess);
  uint64_t next = campaign.first;
  Report total{};
  std::vector<std::pair<pid_t, Report*>> running;
  std::optional<uint64_t> failed;
  while ((next < end && !failed) || !running.empty()) {
    while (next < end && !failed && running.size() < campaign.jobs) {
      const uint64_t last = std::min(end, next + share);
      Report* report = make_report();
      running.emplace_back(start_process([&] {
                             for (uint64_t seed = next; seed < last; ++seed) {
                               report->seed = seed;
                               if (!play_one(Choices(seed), *report)) return;
                             }
                           }),
                           report);
      next = last;
    }
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    const auto process = std::ranges::find(running, ended, &std::pair<pid_t, Report*>::first);
    if (process == running.end()) continue;
    Report& report = *process->second;
    note_crash(report, status);
    if (report.failed) failed = std::min(failed.value_or(report.seed), report.seed);
    total.played += report.played;
    total.went_wrong += report.went_wrong;
    total.ended_in_error += report.ended_in_error;
    total.resumed += report.resumed;
    munmap(&report, sizeof(Report));
    running.erase(process);
  }
  std::printf("%lu worlds: %lu with something wrong, %lu that ended in an error, %lu resumed%s\n",
              total.played, total.went_wrong, total.ended_in_error, total.resumed,
              failed ? "" : "; all held");
  if (failed) print_failure(*failed, campaign.tries);
  return !failed;
}

bool play_again(const std::vector<uint32_t>& choices) {
  Choices again(choices);
  std::printf("%s\n", World::draw(again).text().c_str());
  std::fflush(stdout);
  const auto failure = failure_of(choices);
  std::printf("%s\n", failure ? failure->c_str() : "all holds");
  return !failure;
}

}  // namespace gradferry::sim
