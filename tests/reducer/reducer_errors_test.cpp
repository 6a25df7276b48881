// What a Reducer of C++ programs rejects, and what it says.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gradferry/reducer.h"
#include "ranks.h"

namespace gradferry {
namespace {

TEST(Reducer, StateOfOtherOptionsIsRejected) {
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

// What both ranks say after `steps`, with gradients averaged in backward passes of a net. One that
// has got all gradients of its last step meets the other's error in the next one.
std::string error_in_backward(const std::function<void(Net&, Reducer&, uint32_t)>& steps) {
  const Store store = new_store();
  std::vector<Net> nets(kRanks);
  return common_error([&](uint32_t rank) {
    Reducer reducer(nets[rank].named_parameters().pairs(), with("q4"), store, rank, kRanks);
    reducer.average_in_backward();
    steps(nets[rank], reducer, rank);
    backward(nets[rank], rank, 0);
    reducer.wait();
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

// The same where rank 1 does something to its gradients between backward() and wait().
std::string error_after(const std::function<void(Net&)>& change, uint64_t step = 0) {
  return error_in_backward([&](Net& net, Reducer& reducer, uint32_t rank) {
    backward(net, rank, step);
    if (rank == 1) change(net);
    reducer.wait();
  });
}

TEST(Reducer, GradientThatIsChangedBeforeWaitIsAnErrorOnAllRanks) {
  const std::string error = error_after([](Net& net) { net.first->bias.mutable_grad().mul_(0.5); });
  EXPECT_NE(error.find("rank 1: the gradient of 'first.bias' was changed"), std::string::npos)
      << error;
}

TEST(Reducer, GradientThatIsReplacedBeforeWaitIsAnErrorOnAllRanks) {
  // By one that has seen as many changes, and has the same elements.
  const std::string error = error_after(
      [](Net& net) { net.second->bias.mutable_grad() = net.second->bias.grad().clone(); });
  EXPECT_NE(error.find("rank 1: the gradient of 'second.bias' was changed or replaced"),
            std::string::npos)
      << error;
}

TEST(Reducer, GradientsThatShareMemoryBeforeWaitAreAnErrorOnAllRanks) {
  constexpr uint64_t kWithoutUnused = 1;
  const std::string error = error_after(
      [](Net& net) {
        net.unused->bias.mutable_grad() = net.second->weight.grad()[0].narrow(0, 0, 40);
      },
      kWithoutUnused);
  EXPECT_NE(error.find("rank 1: 'second.weight' and 'unused.bias' share memory"), std::string::npos)
      << error;
}

// The text of what `call` throws, which is an Error of this kind.
std::string error_of(ErrorKind kind, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    return error.what();
  }
  return "no error";
}

TEST(Reducer, StateIsNeitherSavedNorLoadedBetweenBackwardAndWait) {
  const Store store = new_store();
  std::vector<Net> nets(kRanks);
  const auto errors = run_ranks([&](uint32_t rank) {
    Reducer reducer(nets[rank].named_parameters().pairs(), with("q4"), store, rank, kRanks);
    std::stringstream before, ignored, after;
    torch::save(reducer, before);
    reducer.average_in_backward();
    backward(nets[rank], rank, 0);
    EXPECT_EQ(error_of(ErrorKind::kState, [&] { torch::save(reducer, ignored); }),
              "save() was called between backward() and wait(); call wait() first");
    EXPECT_EQ(error_of(ErrorKind::kState, [&] { torch::load(reducer, before); }),
              "load() was called between backward() and wait(); call wait() first");
    reducer.wait();
    torch::save(reducer, after);
    EXPECT_EQ(reducer.stats().steps, 1);
  });
  EXPECT_EQ(errors, kNoErrors);
}

// What one rank says when it averages these, which were registered with other memory.
std::string error_of_averaging(const std::vector<torch::Tensor>& gradients) {
  Tensors named;
  for (size_t i = 0; i < gradients.size(); ++i) {
    named.emplace_back(std::string(1, static_cast<char>('a' + i)),
                       gradients[i].clone().contiguous());
  }
  Reducer reducer(named, with("exact"), nullptr, 0, 1);
  const std::string error = error_of(ErrorKind::kState, [&] { reducer.all_reduce(gradients); });
  return error.substr(0, error.find(';'));
}

TEST(Reducer, TensorsThatShareMemoryAreRejected) {
  const auto all = torch::zeros({40, 50}), flat = torch::zeros({100});
  const std::string shared = "rank 0: 'a' and 'b' share memory, which would be averaged twice";
  EXPECT_EQ(error_of_averaging({all, all}), shared);
  EXPECT_EQ(error_of_averaging({flat.narrow(0, 0, 60), flat.narrow(0, 50, 50)}), shared);
  EXPECT_EQ(error_of_averaging({all.t(), all[3]}), shared);
  EXPECT_EQ(error_of_averaging({all.slice(1, 0, 20), all.slice(1, 0, 20)}), shared);
  const std::string itself = "rank 0: elements of 'a' share memory (expand() and unfold() do so)";
  EXPECT_EQ(error_of_averaging({flat.unfold(0, 10, 5)}), itself);
  EXPECT_EQ(error_of_averaging({flat.narrow(0, 0, 1).expand({30})}), itself);
  // Side by side, also where they are not dense.
  EXPECT_EQ(error_of_averaging({all.slice(1, 0, 20), all.slice(1, 20, 50)}), "no error");
  EXPECT_EQ(error_of_averaging({flat.narrow(0, 0, 50), flat.narrow(0, 50, 50)}), "no error");
  EXPECT_EQ(error_of_averaging({torch::zeros({0, 3}), torch::zeros({0, 3}), all}), "no error");
  EXPECT_EQ(error_of(ErrorKind::kConfig,
                     [&] { Reducer({{"up", all}, {"down", all}}, with("q4"), nullptr, 0, 1); }),
            "'up' and 'down' share memory, which would be averaged twice; leave one of them out");
}

TEST(Reducer, RuleThatMatchesNoTensorIsRejected) {
  EXPECT_EQ(
      error_of(ErrorKind::kConfig,
               [] {
                 Reducer(tensors(), {.rules = {{"*weight", "q8"}, {"*weigth", "exact"}}}, nullptr,
                         0, 1);
               }),
      "the rule for '*weigth' matches no tensor; a pattern covers a whole name, and the names "
      "are 'weight', 'bias'");
}

TEST(Reducer, CodecThatNoTensorGetsIsWarnedOfOnce) {
  struct Heard : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
    std::vector<std::string> texts;
  };
  const auto heard_with = [](const ReducerOptions& options, const Tensors& named) {
    const Store store = new_store();
    std::vector<Heard> heard(kRanks);
    EXPECT_EQ(run_ranks([&](uint32_t rank) {
                const c10::WarningUtils::WarningHandlerGuard guard(&heard[rank]);
                Reducer(named, options, store, rank, kRanks);
              }),
              kNoErrors);
    EXPECT_TRUE(heard[1].texts.empty());
    return heard[0].texts;
  };
  const auto small = heard_with(with("q4"), {{"bias", torch::zeros({2000})}});
  ASSERT_EQ(small.size(), 1);
  EXPECT_EQ(small[0].substr(0, 22), "nothing is compressed:");
  EXPECT_TRUE(heard_with(with("q4"), tensors()).empty());
  EXPECT_TRUE(heard_with(with("exact"), tensors()).empty());
}

TEST(Reducer, OneThatWasMovedFromSaysSo) {
  Reducer reducer(tensors(), with("q4"), nullptr, 0, 1);
  const Reducer other = std::move(reducer);
  const std::string expected = "this Reducer was moved from; call the one that it was moved to";
  // NOLINTBEGIN(bugprone-use-after-move)
  EXPECT_EQ(error_of(ErrorKind::kState, [&] { reducer.wait(); }), expected);
  EXPECT_EQ(error_of(ErrorKind::kState, [&] { reducer.average_in_backward(); }), expected);
  EXPECT_EQ(error_of(ErrorKind::kState, [&] { static_cast<void>(reducer.stats()); }), expected);
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_EQ(other.stats().steps, 0);
}

TEST(Reducer, StateIsLoadedWithOtherBuckets) {
  Reducer one(tensors(), with("q4"), nullptr, 0, 1);
  Reducer other(tensors(), {.codec = "q4", .bucket_cap_mb = 0.001}, nullptr, 0, 1);
  auto mine = gradients(0, 0);
  one.all_reduce(mine);
  std::stringstream saved;
  torch::save(one, saved);
  torch::load(other, saved);
  EXPECT_EQ(other.stats().steps, 1);
}

TEST(Reducer, DamagedStateIsRejectedAndChangesNothing) {
  const Store store = new_store();
  const auto errors = run_ranks([&](uint32_t rank) {
    Reducer reducer(tensors(), with("q4"), store, rank, kRanks);
    auto mine = gradients(rank, 0);
    reducer.all_reduce(mine);
    std::stringstream saved;
    torch::save(reducer, saved);
    torch::serialize::InputArchive sound;
    sound.load_from(saved);
    const auto damaged = [&](int64_t steps, double units, double value, int64_t format = 1) {
      torch::serialize::OutputArchive archive;
      c10::IValue layout;
      torch::Tensor worker, owner;
      sound.read("layout", layout);
      EXPECT_EQ(layout.toStringRef().find("version"), std::string::npos);  // a state outlives it
      sound.read("worker_residual", worker);
      sound.read("owner_residual", owner);
      archive.write("format", c10::IValue(format));
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
      return error_of(ErrorKind::kState, [&] { reducer.load(read); }).substr(0, 26);
    };
    const std::string rejected = "the saved state is damaged";
    EXPECT_EQ(damaged(-1, 1, 0), rejected);
    EXPECT_EQ(damaged(1, -1, 0), rejected);
    EXPECT_EQ(damaged(1, std::nan(""), 0), rejected);
    EXPECT_EQ(damaged(1, 1, std::nan("")), rejected);
    EXPECT_EQ(damaged(1, 1, HUGE_VAL), rejected);
    EXPECT_EQ(damaged(1, 1, 0, 2), "the state has format 2, an");
    EXPECT_EQ(reducer.stats().steps, 1);
    std::stringstream again;
    torch::save(reducer, again);
    EXPECT_EQ(again.str(), saved.str());
  });
  EXPECT_EQ(errors, kNoErrors);
}

}  // namespace
}  // namespace gradferry
