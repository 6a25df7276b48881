// Which ranks share a node. The plan of a bucket between nodes is in tests/fuzz/plan_fuzz.cpp.
#include "hooks/protocol/nodes.h"

#include <gtest/gtest.h>

#include <vector>

#include "gradferry/error.h"

namespace gradferry {
namespace {

using Table = std::vector<std::vector<uint32_t>>;

TEST(Nodes, RailsAreTheRanksOfEqualLocalIndexThatEveryNodeHas) {
  const Nodes nodes(Table{{0, 3, 4}, {1, 2}});
  EXPECT_EQ(nodes.world_size(), 5);
  EXPECT_EQ(nodes.num_nodes(), 2);
  EXPECT_EQ(nodes.num_rails(), 2);
  EXPECT_EQ(nodes.peers(0), (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(nodes.peers(1), (std::vector<uint32_t>{3, 2}));
  EXPECT_EQ(nodes.siblings(4), (std::vector<uint32_t>{0, 3, 4}));
  EXPECT_EQ(nodes.local_index(2), 1);
  EXPECT_TRUE(nodes.is_leader(3));
  EXPECT_FALSE(nodes.is_leader(4));
  EXPECT_FALSE(nodes.is_flat());
  EXPECT_TRUE(Nodes::flat(3).is_flat());
}

TEST(Nodes, TablesThatAreNoneAreRefused) {
  const std::vector<Table> wrong{{},         {{}},     {{0}, {}},     {{0, 0}},     {{0, 2}},
                                 {{1}, {0}}, {{1, 0}}, {{0}, {0, 1}}, {{0, 1}, {3}}};
  for (const Table& table : wrong) {
    EXPECT_THROW(Nodes nodes(table), Error) << testing::PrintToString(table);
  }
}

}  // namespace
}  // namespace gradferry
