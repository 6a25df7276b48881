// How the ranks of a C++ Reducer begin together: each brings to a store what must be equal on all,
// and all leave with one outcome. Keys, n being the number of the current meeting:
//
//   number              counts meetings
//   n/brought/<rank>    what that rank brings
//   n/failed            some rank has brought an error
//   n/rank/<rank>       counts how often that rank came
//   n/size              the world size of the first rank to come, and its name
//   n/came              counts ranks that came
//   n/decided           who makes it 1 decides: the last rank to come, or one that waited too long
//   n/outcome           of the meeting, the same for every rank that came
//   n/read              counts ranks that have read an outcome with which they do not go on
//   n/<rank>            what that rank has left there when it could not connect (connect_ranks.h)
//
// When all ranks have come to one meeting, the keys of those before it are removed.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "gradferry/error.h"

namespace gradferry {

// What a rank brings: names and values that must be equal on all ranks, or why it cannot go on.
struct Brought {
  using Fields = std::vector<std::pair<std::string, std::string>>;
  Fields fields;
  std::optional<Error> error;
  bool is_echo = false;  // another rank's failure caused the error
};

// The outcome of a meeting to which `brought`, by rank, came; nothing came from ranks that are
// missing. The error of the lowest rank that has one, of echoes only where there is no other; or
// the first field in which a rank differs from the lowest one.
std::optional<Error> first_problem(const std::vector<std::optional<Brought>>& brought);

class Meetings {
 public:
  // `store`: with a prefix that is equal on all ranks and used for nothing else. `longest`: how
  // long ranks wait for each other.
  Meetings(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size,
           std::chrono::milliseconds longest);

  // Waits until every rank calls this. Returns the number of the meeting, equal on all ranks.
  // `purpose`: what ranks that stay away did not do, for example "come to make a Reducer". Throws
  // an Error, with the same text on all ranks that came: first_problem(), or Error(kPeer) where
  // ranks stayed away; Error(kPeer) too where the store does not answer.
  uint64_t meet(const Brought& brought, const std::string& purpose);
  // Whether a rank has come to that meeting with an error, so that it will have no good outcome.
  bool has_failed(uint64_t number);

 private:
  std::string outcome_of(uint64_t number, const std::string& purpose);
  void decide(uint64_t number, const std::string& outcome);
  std::optional<Error> other_world_size(uint64_t number);
  std::string decided_without(uint64_t number, const std::string& purpose);
  void let_others_read(uint64_t number);
  void forget_before(uint64_t number);

  const c10::intrusive_ptr<c10d::Store> store_;
  const uint32_t rank_;
  const uint32_t world_size_;
  const std::chrono::milliseconds longest_;
};

}  // namespace gradferry
