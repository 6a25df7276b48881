// Errors of an exchange, and their texts.
#pragma once

#include <cstdint>
#include <string>

#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "peers.h"

namespace gradferry {

// The first thing that went wrong in a bucket on this rank; the commit carries it to the others.
struct Fault {
  WireStatus status = WireStatus::kOk;
  Phase phase = Phase::kScatter;
  uint32_t rank = 0;  // whose message was refused; this rank for kLocalFailure
  uint64_t chunk = 0;
  uint64_t expected = 0;
  uint64_t received = 0;

  explicit operator bool() const { return status != WireStatus::kOk; }
};

// "rank 1 refused what rank 0 sent: ..." with both values and advice. `reporter` saw the fault.
std::string describe(const Fault& fault, uint32_t reporter, uint64_t step);

// The error on `rank` for a collective that failed with `reason`: the error that another rank
// reported, else the missing ranks. `number` is that of the chunk, or of the bucket for a commit.
// Takes a second or two.
Error lost_contact(Peers& peers, uint32_t rank, Phase phase, uint64_t step, uint64_t number,
                   const std::string& reason);

}  // namespace gradferry
