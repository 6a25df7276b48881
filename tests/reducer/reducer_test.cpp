// The Reducer of C++ programs.
#include "gradferry/reducer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <vector>

#include "ranks.h"

namespace gradferry {
namespace {

// What ranks get for these gradients, by rank and step.
using Averages = std::vector<std::vector<std::vector<torch::Tensor>>>;

bool same_on_all_ranks(const Averages& averages) {
  for (const auto& steps : averages) {
    for (size_t s = 0; s < steps.size(); ++s) {
      for (size_t i = 0; i < steps[s].size(); ++i) {
        if (!torch::equal(steps[s][i], averages[0][s][i])) return false;
      }
    }
  }
  return true;
}

TEST(Reducer, ExactAveragesAreTheMeanOnAllRanks) {
  const Store store = new_store();
  Averages averages(kRanks, std::vector<std::vector<torch::Tensor>>(2));
  const auto errors = run_ranks([&](uint32_t rank) {
    Reducer reducer(tensors(), with("exact"), store, rank, kRanks);
    for (uint64_t step = 0; step < 2; ++step) {
      averages[rank][step] = gradients(rank, step);
      reducer.all_reduce(averages[rank][step]);
    }
    EXPECT_EQ(reducer.stats().steps, 2);
    EXPECT_EQ(reducer.stats().gradient_bytes, 2 * 4 * (6400 + 7));
  });
  ASSERT_EQ(errors, kNoErrors);
  EXPECT_TRUE(same_on_all_ranks(averages));
  for (uint64_t step = 0; step < 2; ++step) {
    const auto mine = gradients(0, step), theirs = gradients(1, step);
    for (size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(torch::equal(averages[0][step][i], (mine[i] + theirs[i]) * 0.5));
    }
  }
}

// Parameters after some steps of SGD, by rank.
std::vector<torch::Tensor> train(bool in_backward, double bucket_cap_mb) {
  const Store store = new_store();
  std::vector<torch::Tensor> ends(kRanks);
  std::vector<Net> nets;
  nets.reserve(kRanks);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    torch::manual_seed(3);
    nets.emplace_back();
  }
  const auto errors = run_ranks([&](uint32_t rank) {
    Net& net = nets[rank];
    Reducer reducer(net.named_parameters().pairs(), {.bucket_cap_mb = bucket_cap_mb}, store, rank,
                    kRanks);
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    if (in_backward) reducer.average_in_backward();
    for (uint64_t step = 0; step < 4; ++step) {
      backward(net, rank, step);
      if (in_backward) {
        reducer.wait();
      } else {
        std::vector<torch::Tensor> given;
        for (auto& parameter : net.parameters()) {
          auto& gradient = parameter.mutable_grad();
          if (!gradient.defined()) gradient = torch::zeros_like(parameter);
          given.push_back(gradient);
        }
        reducer.all_reduce(given);
      }
      optimizer.step();
    }
    std::vector<torch::Tensor> flat;
    for (const auto& parameter : net.parameters()) flat.push_back(parameter.detach().flatten());
    ends[rank] = torch::cat(flat);
  });
  EXPECT_EQ(errors, kNoErrors);
  return ends;
}

TEST(Reducer, AveragesInBackwardHaveTheBitsOfThoseAfterIt) {
  const auto after = train(false, 25), during = train(true, 25), small = train(true, 0.001);
  EXPECT_TRUE(torch::equal(after[0], after[1]));
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(torch::equal(during[rank], after[0]));
    EXPECT_TRUE(torch::equal(small[rank], after[0]));
  }
}

TEST(Reducer, ResumesToTheSameBits) {
  const Store store = new_store();
  Averages whole(kRanks), resumed(kRanks);
  const auto errors = run_ranks([&](uint32_t rank) {
    std::stringstream saved;
    Reducer reducer(tensors(), with("rht:bits=3"), store, rank, kRanks);
    for (uint64_t step = 0; step < 4; ++step) {
      if (step == 2) torch::save(reducer, saved);
      whole[rank].push_back(gradients(rank, step));
      reducer.all_reduce(whole[rank].back());
    }
    Reducer later(tensors(), with("rht:bits=3"), store, rank, kRanks);
    torch::load(later, saved);
    EXPECT_EQ(later.stats().steps, 2);
    for (uint64_t step = 2; step < 4; ++step) {
      resumed[rank].push_back(gradients(rank, step));
      later.all_reduce(resumed[rank].back());
    }
  });
  ASSERT_EQ(errors, kNoErrors);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    for (size_t step = 0; step < 2; ++step) {
      EXPECT_TRUE(torch::equal(resumed[rank][step][0], whole[rank][step + 2][0]));
    }
  }
}

TEST(Reducer, OneRankKeepsItsGradientsAndNeedsNoStore) {
  Reducer reducer(tensors(), with("q4"), nullptr, 0, 1);
  auto mine = gradients(0, 0);
  reducer.all_reduce(mine);
  EXPECT_TRUE(torch::equal(mine[0], gradients(0, 0)[0]));
  EXPECT_EQ(reducer.stats().wire_bytes, 0);
  EXPECT_EQ(reducer.stats().gradient_bytes, 4 * (6400 + 7));
}

TEST(Reducer, MomentumModeDeliversTheMomentum) {
  const Store store = new_store();
  const auto errors = run_ranks([&](uint32_t rank) {
    Reducer reducer(tensors(), {.codec = "exact", .momentum = 0.5}, store, rank, kRanks);
    for (const double expected : {0.5, 0.75, 0.875}) {
      std::vector<torch::Tensor> ones{torch::ones({64, 100}), torch::ones({7})};
      reducer.all_reduce(ones);
      EXPECT_TRUE(torch::equal(ones[0], torch::full({64, 100}, expected)));
    }
  });
  EXPECT_EQ(errors, kNoErrors);
}

}  // namespace
}  // namespace gradferry
