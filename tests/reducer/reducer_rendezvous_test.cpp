// How ranks begin a Reducer together, and what they say when they cannot.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cerrno>
#include <chrono>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "gradferry/reducer.h"
#include "ranks.h"
#include "rendezvous.h"

namespace gradferry {
namespace {

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

// Rank 0 comes with what it has heard of rank 1.
TEST(Rendezvous, TheCauseIsSaidAndNotWhatFollowedFromIt) {
  const Store store = new_store();
  const auto error = common_error([&](uint32_t rank) {
    Rendezvous rendezvous(store, rank, kRanks, std::chrono::minutes(1));
    const Brought cause{.fields = {}, .error = Error(ErrorKind::kState, "the cause")};
    const Brought echo{
        .fields = {}, .error = Error(ErrorKind::kPeer, "rank 1 failed"), .is_echo = true};
    rendezvous.meet(
        {.purpose = "come", .brought = rank == 0 ? &echo : &cause, .between_polls = {}});
  });
  EXPECT_EQ(error, "rank 1: the cause");
}

TEST(Reducer, RankThatStaysAwayIsNamed) {
  const Store store = new_store();
  try {
    const ReducerOptions options{.timeout = std::chrono::milliseconds(100)};
    const Reducer reducer(tensors(), options, store, 0, kRanks);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kPeer);
    EXPECT_EQ(std::string(error.what()).substr(0, 44),
              "rank 1 did not make a Reducer within 0.05 s;");
  }
}

TEST(Reducer, TwoProcessesOfOneRankAreAnError) {
  const Store store = new_store();
  const auto error =
      common_error([&](uint32_t) { Reducer(tensors(), with("q4"), store, 1, kRanks); });
  EXPECT_EQ(error,
            "two processes say that they are rank 1, or an earlier run left its keys in the store; "
            "give every process a rank of its own, and every run a new store");
}

TEST(Reducer, KeysOfARunThatWasKilledAreNamed) {
  const Store store = new_store();
  store->add("gradferry/reducers/0/rank/0", 1);  // by rank 0, before the rendezvous had an outcome
  const auto error = common_error([&](uint32_t rank) {
    while (rank == 0 && !store->check({"gradferry/reducers/0/came"})) std::this_thread::yield();
    Reducer(tensors(), with("q4"), store, rank, kRanks);
  });
  EXPECT_NE(error.find("an earlier run left its keys in the store"), std::string::npos) << error;
}

// One rank comes and waits; then the other does, with another world size.
TEST(Reducer, WorldSizesThatDifferAreSaidAtOnce) {
  for (const uint32_t first : {0U, 1U}) {
    const Store store = new_store();
    const auto begin = std::chrono::steady_clock::now();
    const std::string error = common_error([&](uint32_t rank) {
      while (rank != first && !store->check({"gradferry/reducers/0/size"})) {
        std::this_thread::yield();
      }
      Reducer(tensors(), with("q4"), store, rank, rank == 0 ? 2 : 3);
    });
    const std::string here = first == 0
                                 ? "rank 1 differs from rank 0 in world size: '3' instead of '2'"
                                 : "rank 0 differs from rank 1 in world size: '2' instead of '3'";
    EXPECT_EQ(error.substr(0, error.find(';')), here);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(1));
  }
}

// The store of a rank that cannot say where it listens.
class NowhereStore final : public c10d::PrefixStore {
 public:
  NowhereStore(const gradferry::Store& store, std::exception_ptr reason)
      : PrefixStore("all", store), reason_(std::move(reason)) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (key == "gradferry/reducers/0/1") std::rethrow_exception(reason_);
    PrefixStore::set(key, value);
  }

 private:
  const std::exception_ptr reason_;
};

// What both ranks say when rank 1 cannot connect. Rank 0 hears it while it waits for connections.
std::string error_of_connecting(const std::exception_ptr& reason) {
  const Store store = new_store();
  const auto begin = std::chrono::steady_clock::now();
  const std::string error = common_error([&](uint32_t rank) {
    Store own = c10::make_intrusive<c10d::PrefixStore>("all", store);
    if (rank == 1) own = c10::make_intrusive<NowhereStore>(store, reason);
    Reducer(tensors(), with("q4"), own, rank, kRanks);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(1));
  return error;
}

TEST(Reducer, RankThatCannotConnectIsHeardAtOnce) {
  const std::system_error route(EHOSTUNREACH, std::generic_category(), "connect");
  EXPECT_EQ(error_of_connecting(std::make_exception_ptr(route)),
            "rank 1: cannot connect to the other ranks: connect: No route to host; look at the "
            "network of this rank's host");
  const std::system_error files(EMFILE, std::generic_category(), "socket");
  EXPECT_EQ(error_of_connecting(std::make_exception_ptr(files)),
            "rank 1: cannot connect to the other ranks: socket: Too many open files; raise the "
            "process's limit of open files (ulimit -n)");
  EXPECT_EQ(error_of_connecting(std::make_exception_ptr(std::bad_alloc())),
            "rank 1: cannot make a Reducer: std::bad_alloc");
}

TEST(Reducer, ErrorsThatAnotherRankCausesAreSaidAsSuch) {
  const c10::DistStoreError lost({__func__, __FILE__, __LINE__}, "Wait Timeout");
  const std::string error = error_of_connecting(std::make_exception_ptr(lost));
  EXPECT_EQ(error.substr(0, error.find(';')),
            "rank 1: the other ranks did not connect: Wait Timeout");
}

TEST(Reducer, StoreKeepsTheKeysOfOneRendezvous) {
  const auto make = [](const Store& store, uint32_t rank, uint64_t seed) {
    Reducer(tensors(), {.codec = "q4", .seed = seed}, store, rank, kRanks);
  };
  const Store store = new_store(), other = new_store();
  ASSERT_EQ(run_ranks([&](uint32_t rank) { make(other, rank, 0); }), kNoErrors);
  for (int time = 0; time < 2; ++time)
    common_error([&](uint32_t rank) { make(store, rank, rank); });
  store->set("gradferry/reducers/1/0", "where a rank listened that could not connect");
  ASSERT_EQ(run_ranks([&](uint32_t rank) { make(store, rank, 0); }), kNoErrors);
  EXPECT_EQ(store->getNumKeys(), other->getNumKeys());
}

}  // namespace
}  // namespace gradferry
