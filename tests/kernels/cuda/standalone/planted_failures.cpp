// A standalone test that fails is seen to fail.
#include "gtest/gtest.h"

TEST(Planted, Expectation) { EXPECT_EQ(1 + 1, 3) << "planted"; }
TEST(Planted, Assertion) {
  SCOPED_TRACE("a trace");
  ASSERT_TRUE(false);
  std::exit(0);  // not reached
}
TEST(Planted, Exception) { throw std::runtime_error("planted"); }
TEST(Planted, Nothing) {}
