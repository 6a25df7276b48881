// Ranks of a Reducer as threads of one process, with a store that all of them see.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "gradferry/reducer.h"

namespace gradferry {

inline constexpr uint32_t kRanks = 2;

using Tensors = Reducer::NamedTensors;
using Store = c10::intrusive_ptr<c10d::Store>;

// Runs `body` for every rank; the text of each one's error.
inline std::vector<std::string> run_ranks(const std::function<void(uint32_t)>& body) {
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

inline const std::vector<std::string> kNoErrors(kRanks);

inline Store new_store() { return c10::make_intrusive<c10d::HashStore>(); }

// A large matrix, which is compressed, and a bias, which is not.
inline Tensors tensors(int64_t rows = 64) {
  return {{"weight", torch::zeros({rows, 100})}, {"bias", torch::zeros({7})}};
}

inline std::vector<torch::Tensor> gradients(uint32_t rank, uint64_t step) {
  const auto generator = torch::make_generator<torch::CPUGeneratorImpl>(100 * step + rank);
  return {torch::randn({64, 100}, generator), torch::randn({7}, generator)};
}

inline ReducerOptions with(const std::string& codec) { return {.codec = codec}; }

// What both ranks say, if it is the same, but for each one's last buckets.
inline std::string common_error(const std::function<void(uint32_t)>& body) {
  auto errors = run_ranks(body);
  for (std::string& error : errors)
    error.resize(std::min(error.find("\nlast buckets"), error.size()));
  EXPECT_EQ(errors[0], errors[1]);
  return errors[0];
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

inline void backward(Net& net, uint32_t rank, uint64_t step) {
  const auto generator = torch::make_generator<torch::CPUGeneratorImpl>(10 * step + rank);
  net.zero_grad();
  net.forward(torch::randn({8, 40}, generator), step != 1).square().mean().backward();
}

}  // namespace gradferry
