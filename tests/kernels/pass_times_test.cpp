#include "measure/pass_times.h"

#include <gtest/gtest.h>

namespace gradferry {
namespace {

constexpr double kUsual = 1.0, kInterrupted = 20.0;

// One thread, a section for each of the times.
Pass pass(std::initializer_list<double> sections) { return {Sections(sections)}; }

TEST(RatiosOfRounds, AreOfTheSameNumbersWhereEveryPassOfTheRoofIsInterrupted) {
  // The roof takes half as long as the case. In each of its passes another section is interrupted,
  // so that no whole pass shows the ratio, while the median of every section does.
  const std::vector<Pass> roofs = {
      pass({kInterrupted, kUsual, kUsual, kUsual, kUsual, kUsual, kUsual}),
      pass({kUsual, kInterrupted, kUsual, kUsual, kUsual, kUsual, kUsual}),
      pass({kUsual, kUsual, kInterrupted, kUsual, kUsual, kUsual, kUsual}),
      pass({kUsual, kUsual, kUsual, kInterrupted, kUsual, kUsual, kUsual}),
  };
  const std::vector<Pass> cases(2, pass({2, 2, 2, 2, 2, 2, 2}));
  const RoundRatios ratios = ratios_of_rounds(roofs, cases);
  EXPECT_EQ(ratios.minimum, 0.5);
  EXPECT_EQ(ratios.median, 0.5);
  EXPECT_EQ(ratios.maximum, 0.5);
}

TEST(RatiosOfRounds, ComparesWithTheRoofsBeforeAndAfter) {
  const std::vector<Pass> roofs = {pass({1}), pass({3}), pass({2}),
                                   pass({4}), pass({4}), pass({8})};
  const std::vector<Pass> cases = {pass({4}), pass({4}), pass({4})};
  const RoundRatios ratios = ratios_of_rounds(roofs, cases);
  EXPECT_EQ(ratios.minimum, 0.5);
  EXPECT_EQ(ratios.median, 0.75);
  EXPECT_EQ(ratios.maximum, 1.5);
}

TEST(RatiosOfRounds, PoolsTheSectionsOfAllThreads) {
  const std::vector<Pass> roofs(2, Pass{{1, 1}, {1, kInterrupted}});
  const std::vector<Pass> cases = {Pass{{2, 2}, {2, 2}}};
  EXPECT_EQ(ratios_of_rounds(roofs, cases).median, 0.5);
}

}  // namespace
}  // namespace gradferry
