// The Reducer of C++ programs. Ranks are threads of one process, with a store that all of them see.
#include "gradferry/reducer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

namespace gradferry {
namespace {

constexpr uint32_t kRanks = 2;

using Tensors = Reducer::NamedTensors;
using Store = c10::intrusive_ptr<c10d::Store>;

// Runs `body` for every rank; the text of each one's error.
std::vector<std::string> run_ranks(const std::function<void(uint32_t)>& body) {
  std::vector<std::string> errors(kRanks);
  std::vector<std::jthread> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  ranks.clear();
  return errors;
}

const std::vector<std::string> kNoErrors(kRanks);

Store new_store() { return c10::make_intrusive<c10d::HashStore>(); }

// A large matrix, which is compressed, and a bias, which is not.
Tensors tensors(int64_t rows = 64) {
  return {{"weight", torch::zeros({rows, 100})}, {"bias", torch::zeros({7})}};
}

std::vector<torch::Tensor> gradients(uint32_t rank, uint64_t step) {
  const auto generator = torch::make_generator<torch::CPUGeneratorImpl>(100 * step + rank);
  return {torch::randn({64, 100}, generator), torch::randn({7}, generator)};
}

ReducerOptions with(const std::string& codec) { return {.codec = codec}; }

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

TEST(Reducer, WhatACodecWithholdsComesLaterAndFewerBytesTravel) {
  constexpr uint64_t kSteps = 40;
  const Store store = new_store();
  std::vector<torch::Tensor> sums(kRanks);
  const auto errors = run_ranks([&](uint32_t rank) {
    Reducer reducer(tensors(), with("q4"), store, rank, kRanks);
    sums[rank] = torch::zeros({64, 100});
    for (uint64_t step = 0; step < kSteps; ++step) {
      auto mine = gradients(rank, 0);
      reducer.all_reduce(mine);
      sums[rank] += mine[0];
    }
    const ReducerStats stats = reducer.stats();
    EXPECT_LT(5 * stats.wire_bytes, stats.gradient_bytes);  // an all-reduce of two sends as many
  });
  ASSERT_EQ(errors, kNoErrors);
  EXPECT_TRUE(torch::equal(sums[0], sums[1]));
  const auto mean = (gradients(0, 0)[0] + gradients(1, 0)[0]) * 0.5;
  // What is withheld at the end is less than a step's rounding errors, of both encodings.
  EXPECT_LT((sums[0] / static_cast<double>(kSteps) - mean).abs().max().item<double>(), 0.05);
}

// A model whose last layer some passes do not use.
struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(40, 50));
    second = register_module("second", torch::nn::Linear(50, 30));
    unused = register_module("unused", torch::nn::Linear(30, 40));
  }
  torch::Tensor forward(const torch::Tensor& input, bool all) {
    const auto output = second->forward(torch::relu(first->forward(input)));
    return all ? unused->forward(output) : output;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, unused{nullptr};
};

void backward(Net& net, uint32_t rank, uint64_t step) {
  const auto generator = torch::make_generator<torch::CPUGeneratorImpl>(10 * step + rank);
  net.zero_grad();
  net.forward(torch::randn({8, 40}, generator), step != 1).square().mean().backward();
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

TEST(Reducer, StateOfOtherOptionsIsRefused) {
  const Store store = new_store();
  const auto errors = run_ranks([&](uint32_t rank) {
    std::stringstream saved;
    Reducer one(tensors(), with("q4"), store, rank, kRanks);
    Reducer other(tensors(), with("q8"), store, rank, kRanks);
    torch::save(one, saved);
    torch::load(other, saved);
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error.substr(0, 73),
              "the state was saved with 'codec: q4', and here it is 'codec: q8'; load wh");
  }
}

// What both ranks say, if it is the same, but for each one's last buckets.
std::string common_error(const std::function<void(uint32_t)>& body) {
  auto errors = run_ranks(body);
  for (std::string& error : errors)
    error.resize(std::min(error.find("\nlast buckets"), error.size()));
  EXPECT_EQ(errors[0], errors[1]);
  return errors[0];
}

TEST(Reducer, RanksThatDifferAreNamedOnAllOfThem) {
  const Store store = new_store();
  const auto make = [&](uint32_t rank, const Tensors& named, const ReducerOptions& options) {
    Reducer(named, options, store, rank, kRanks);
  };
  const std::string advice = "; start every rank with the same program, options and model";
  EXPECT_EQ(common_error([&](uint32_t rank) { make(rank, tensors(), with(rank ? "q8" : "q4")); }),
            "rank 1 differs from rank 0 in codec: 'q8' instead of 'q4'" + advice);
  EXPECT_EQ(common_error([&](uint32_t rank) { make(rank, tensors(64 + rank), with("q4")); }),
            "rank 1 differs from rank 0 in tensor 0: 'weight [65, 100] Float q4' instead of "
            "'weight [64, 100] Float q4'" +
                advice);
  EXPECT_EQ(
      common_error([&](uint32_t rank) { make(rank, tensors(), {.codec = "q4", .seed = rank}); }),
      "rank 1 differs from rank 0 in seed: '1' instead of '0'" + advice);
  // And the store can be used again.
  EXPECT_EQ(run_ranks([&](uint32_t rank) { make(rank, tensors(), with("q4")); }), kNoErrors);
}

TEST(Reducer, ErrorOfOneRankIsSaidOnAllOfThem) {
  const Store store = new_store();
  const auto error = common_error([&](uint32_t rank) {
    Reducer(tensors(), with(rank == 1 ? "q5" : "q4"), store, rank, kRanks);
  });
  EXPECT_EQ(error.substr(0, 13), "rank 1: codec") << error;
  const auto integers = common_error([&](uint32_t rank) {
    const Tensors wrong{{"a", torch::zeros({3}, rank == 0 ? torch::kLong : torch::kFloat)}};
    Reducer(wrong, with("q4"), store, rank, kRanks);
  });
  EXPECT_EQ(integers.substr(0, 36), "rank 0: 'a': dtype Long is not suppo") << integers;
}

TEST(Reducer, RankThatStaysAwayIsNamed) {
  const Store store = new_store();
  try {
    Reducer(tensors(), {.timeout = std::chrono::milliseconds(100)}, store, 0, kRanks);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeer);
    EXPECT_EQ(std::string(error.what()).substr(0, 52),
              "rank 1 did not come to make a Reducer within 0.05 s;");
  }
}

TEST(Reducer, TwoProcessesOfOneRankAreRefused) {
  const Store store = new_store();
  const auto error =
      common_error([&](uint32_t) { Reducer(tensors(), with("q4"), store, 1, kRanks); });
  EXPECT_EQ(error, "two processes say that they are rank 1; give every process a rank of its own");
}

TEST(Reducer, WrongCallEndsItOnAllRanks) {
  const Store store = new_store();
  const auto errors = run_ranks([&](uint32_t rank) {
    Reducer reducer(tensors(), with("q4"), store, rank, kRanks);
    auto mine = gradients(rank, 0);
    if (rank == 1) mine.pop_back();
    reducer.all_reduce(mine);
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 1: 1 tensors were passed and 2 registered"), std::string::npos)
        << error;
    EXPECT_NE(error.find("This Reducer is finished, on all ranks."), std::string::npos) << error;
  }
}

TEST(Reducer, SecondPassBeforeWaitIsAnErrorOnAllRanks) {
  const Store store = new_store();
  std::vector<Net> nets(kRanks);
  const auto errors = run_ranks([&](uint32_t rank) {
    Reducer reducer(nets[rank].named_parameters().pairs(), with("q4"), store, rank, kRanks);
    reducer.average_in_backward();
    backward(nets[rank], rank, 0);
    if (rank == 0) backward(nets[rank], rank, 0);
    reducer.wait();
    backward(nets[rank], rank, 1);
    reducer.wait();
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("got a second gradient before wait()"), std::string::npos) << error;
  }
}

// What both ranks say after `steps`, with gradients averaged in backward passes of a net.
std::string error_in_backward(const std::function<void(Net&, Reducer&, uint32_t)>& steps) {
  const Store store = new_store();
  std::vector<Net> nets(kRanks);
  return common_error([&](uint32_t rank) {
    Reducer reducer(nets[rank].named_parameters().pairs(), with("q4"), store, rank, kRanks);
    reducer.average_in_backward();
    steps(nets[rank], reducer, rank);
  });
}

TEST(Reducer, WaitWithoutAPassIsAnErrorOnAllRanks) {
  const std::string error = error_in_backward([](Net& net, Reducer& reducer, uint32_t rank) {
    backward(net, rank, 0);
    reducer.wait();
    if (rank == 0) backward(net, rank, 1);
    reducer.wait();
  });
  EXPECT_NE(error.find("rank 1: wait() without a backward pass"), std::string::npos) << error;
}

TEST(Reducer, GradientThatIsChangedBeforeWaitIsAnErrorOnAllRanks) {
  const std::string error = error_in_backward([](Net& net, Reducer& reducer, uint32_t rank) {
    backward(net, rank, 0);
    if (rank == 1) net.first->bias.mutable_grad().mul_(0.5);
    reducer.wait();
  });
  EXPECT_NE(error.find("rank 1: the gradient of 'first.bias' was changed"), std::string::npos)
      << error;
}

TEST(Reducer, TensorWithTwoNamesIsRefused) {
  const auto shared = torch::zeros({30, 40});
  try {
    Reducer({{"up", shared}, {"down", shared}}, with("q4"), nullptr, 0, 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.what(),
              std::string("'up' and 'down' are one tensor; leave out one of the names"));
  }
}

TEST(Reducer, DamagedStateIsRefusedAndChangesNothing) {
  const Store store = new_store();
  const auto errors = run_ranks([&](uint32_t rank) {
    Reducer reducer(tensors(), with("q4"), store, rank, kRanks);
    auto mine = gradients(rank, 0);
    reducer.all_reduce(mine);
    std::stringstream saved;
    torch::save(reducer, saved);
    torch::serialize::InputArchive sound;
    sound.load_from(saved);
    const auto damaged = [&](int64_t steps, double units, double value) {
      torch::serialize::OutputArchive archive;
      c10::IValue layout;
      torch::Tensor worker, owner;
      sound.read("layout", layout);
      sound.read("worker_residual", worker);
      sound.read("owner_residual", owner);
      archive.write("layout", layout);
      archive.write("steps", c10::IValue(steps));
      archive.write("loss_scale", c10::IValue(units));
      worker = worker.clone();
      worker[0] = value;
      archive.write("worker_residual", worker);
      archive.write("owner_residual", owner);
      std::stringstream stream;
      archive.save_to(stream);
      torch::serialize::InputArchive read;
      read.load_from(stream);
      EXPECT_THROW(reducer.load(read), Error) << steps << " " << units << " " << value;
    };
    damaged(-1, 1, 0);
    damaged(1, -1, 0);
    damaged(1, std::nan(""), 0);
    damaged(1, 1, std::nan(""));
    damaged(1, 1, HUGE_VAL);
    EXPECT_EQ(reducer.stats().steps, 1);
    std::stringstream again;
    torch::save(reducer, again);
    EXPECT_EQ(again.str(), saved.str());
  });
  EXPECT_EQ(errors, kNoErrors);
}

TEST(Reducer, OneRankKeepsItsGradientsAndNeedsNoStore) {
  Reducer reducer(tensors(), with("q4"), nullptr, 0, 1);
  auto mine = gradients(0, 0);
  reducer.all_reduce(mine);
  EXPECT_TRUE(torch::equal(mine[0], gradients(0, 0)[0]));
  EXPECT_EQ(reducer.stats().wire_bytes, 0);
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

TEST(Reducer, MeetsInATcpStore) {
  c10d::TCPStoreOptions serves;
  serves.port = 0;  // any
  serves.isServer = true;
  serves.waitWorkers = false;
  const auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", serves);
  const auto errors = run_ranks([&](uint32_t rank) {
    c10d::TCPStoreOptions asks;
    asks.port = server->getPort();
    asks.waitWorkers = false;
    const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", asks);
    Reducer reducer(tensors(), with("q4"), store, rank, kRanks);
    auto mine = gradients(rank, 0);
    reducer.all_reduce(mine);
  });
  EXPECT_EQ(errors, kNoErrors);
}

}  // namespace
}  // namespace gradferry
