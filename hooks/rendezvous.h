// How ranks begin something together: each arrives at a rendezvous in a store, and all leave with
// one outcome. A rank that does not arrive is named there, before anybody has posted a collective.
// Keys, where n is the number of the current rendezvous:
//
//   number              counts rendezvous
//   n/brought/<rank>    what that rank brings, if ranks bring something
//   n/failed            some rank has brought an error, or said that it will
//   n/rank/<rank>       counts how often that rank arrived
//   n/size              the world size of the first rank to arrive, and its name
//   n/came              counts ranks that arrived
//   n/decided           who makes it 1 decides: the last rank, or one that waited too long
//   n/error             what every rank that arrived throws; none: all did, and nothing is wrong
//   n/outcome           it is decided, behind the error
//   n/read              counts ranks that read an outcome with which they do not go on
//   n/<rank>            what a rank leaves that could not connect (connect_ranks.h)
//
// When all ranks have arrived at a rendezvous, the keys of those before it are removed.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "gradferry/error.h"
#include "protocol/faults.h"

namespace gradferry {

// What a rank brings: names and values that must be equal on all ranks, or why it cannot go on.
struct Brought {
  using Fields = std::vector<std::pair<std::string, std::string>>;
  Fields fields;
  std::optional<Error> error;
  bool is_echo = false;  // another rank's failure caused the error
};

class Rendezvous {
 public:
  // `store`: with a prefix that is equal on all ranks and used for nothing else. `longest`: how
  // long ranks wait for each other. `world_ranks`: for errors.
  Rendezvous(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size,
             std::chrono::milliseconds longest, WorldRanks world_ranks = {});

  struct Visit {
    std::string purpose;  // what a rank that does not arrive did not do: "make a Reducer"
    // Null: ranks only wait for each other. Otherwise it is compared, and so are world sizes; and
    // two processes that say that they are the same rank are an error.
    const Brought* brought = nullptr;
    // Called while this rank waits. What it throws ends the rendezvous for all: an EchoError is its
    // outcome; anything else is thrown here, and others hear that this rank was interrupted. May be
    // empty.
    std::function<void()> between_polls;
  };
  // Waits until every rank calls this. Returns the number of the rendezvous, equal on all
  // ranks. Throws an Error, with the same text on all ranks that arrived: the error of the lowest
  // rank that brought one, an echo only if there is no other; the first field in which a rank
  // differs from the lowest one; or Error(kPeer) if ranks did not arrive. Error(kPeer) also if the
  // store does not answer.
  uint64_t meet(const Visit& visit);
  // Whether a rank has brought an error to that rendezvous, which then has no good outcome.
  bool has_failed(uint64_t number);

 private:
  void come(uint64_t number, const Visit& visit);
  Brought wait(uint64_t number, const Visit& visit);
  Brought outcome_of(uint64_t number, const Visit& visit);
  void decide(uint64_t number, const Brought& outcome);
  void decide(uint64_t number, const Error& error);
  std::optional<Error> other_world_size(uint64_t number);
  void let_others_read(uint64_t number);
  void forget_before(uint64_t number);
  std::string name_of(uint32_t rank) const { return name_ranks({in_world(world_ranks_, rank)}); }

  const c10::intrusive_ptr<c10d::Store> store_;
  const uint32_t rank_;
  const uint32_t world_size_;
  const std::chrono::milliseconds longest_;
  const WorldRanks world_ranks_;
};

}  // namespace gradferry
