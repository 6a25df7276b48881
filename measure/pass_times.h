// Times of passes over many tiles, and statistics of several passes that suit a shared machine.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <numeric>
#include <vector>

namespace gradferry {

inline double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline double median(const std::vector<double>& unsorted) {
  std::vector<double> values = unsorted;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : 0.5 * (values[half - 1] + values[half]);
}

inline double minimum(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}

// One pass over all tiles is timed in sections of this many: 1 MB of fp32 gradient, less than a
// millisecond. An interruption then spoils a section of one pass, not the pass.
constexpr size_t kSectionTiles = 64;
using Sections = std::vector<double>;  // of one thread
using Pass = std::vector<Sections>;    // of all threads
using Work = std::function<void(size_t first_tile, size_t num_tiles)>;

// Typical seconds of a pass: `statistic` of each section over the passes, summed over the sections,
// for the thread that takes longest.
inline double typical_seconds(const std::vector<Pass>& passes,
                              double (*statistic)(const std::vector<double>&)) {
  double longest = 0;
  for (size_t thread = 0; thread < passes.front().size(); ++thread) {
    double sum = 0;
    for (size_t section = 0; section < passes.front()[thread].size(); ++section) {
      std::vector<double> values;
      for (const Pass& pass : passes) values.push_back(pass[thread][section]);
      sum += statistic(values);
    }
    longest = std::max(longest, sum);
  }
  return longest;
}

// Ratios of a case to a roof that was timed before and after it in every round.
struct RoundRatios {
  double median, minimum, maximum;  // of the rounds
};

// The ratio of a round is the median of roof / case over its sections, each with the roof before
// and the roof after. So minimum, median and maximum are statistics of the same numbers.
// Interruptions only ever add time and do not move a median; a mean of both roofs would include
// them. `roofs` has two passes for each of `cases`, all with the same sections.
inline RoundRatios ratios_of_rounds(const std::vector<Pass>& roofs,
                                    const std::vector<Pass>& cases) {
  std::vector<double> rounds;
  for (size_t round = 0; round < cases.size(); ++round) {
    const Pass &before = roofs[2 * round], &after = roofs[2 * round + 1], &own = cases[round];
    std::vector<double> sections;
    for (size_t thread = 0; thread < own.size(); ++thread) {
      for (size_t i = 0; i < own[thread].size(); ++i) {
        sections.push_back(before[thread][i] / own[thread][i]);
        sections.push_back(after[thread][i] / own[thread][i]);
      }
    }
    rounds.push_back(median(sections));
  }
  return {median(rounds), minimum(rounds), *std::max_element(rounds.begin(), rounds.end())};
}

inline double total(const Pass& pass) {
  double longest = 0;
  for (const Sections& sections : pass) {
    longest = std::max(longest, std::accumulate(sections.begin(), sections.end(), 0.0));
  }
  return longest;
}

}  // namespace gradferry
