// Errors of an exchange, and their texts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradferry/error.h"
#include "gradferry/wire.h"

namespace gradferry {

// Numbers in the whole job of the ranks of a group, by rank; empty: they are the same. Errors name
// processes by these, since a process has another rank in each of its groups.
using WorldRanks = std::vector<uint32_t>;

// A number that is no rank of the group, as damaged bytes may have it, stays as it is.
inline uint32_t in_world(const WorldRanks& ranks, uint32_t rank) {
  return rank < ranks.size() ? ranks[rank] : rank;
}

// "rank 1", "ranks 1 and 2", "ranks 0, 1, ... and 9 more".
std::string name_ranks(const std::vector<uint32_t>& ranks);

// This rank failed because another rank did; that rank's error has the cause.
class EchoError final : public Error {
 public:
  explicit EchoError(const std::string& message) : Error(ErrorKind::kPeer, message) {}
};

// The first thing that went wrong in a bucket on this rank; the commit carries it to the others.
struct Fault {
  WireStatus status = WireStatus::kOk;
  Phase phase = Phase::kScatter;
  uint32_t rank = 0;  // whose message was rejected; this rank for kLocalFailure
  uint64_t chunk = 0;
  uint64_t expected = 0;
  uint64_t received = 0;

  explicit operator bool() const { return status != WireStatus::kOk; }
};

// What the commits of a bucket say, equal on all ranks that can read them.
struct Verdict {
  Fault fault;
  uint32_t reporter = 0;  // the rank that saw it
  uint64_t step = 0;      // at which that rank was, if others are at another one
};

// Whether the bits in a commit are those of a loss scale: a positive finite fp32.
bool is_loss_scale(uint64_t bits);
// Ends the text about a scale that is none.
inline constexpr const char* kUnsoundLossScale =
    "; it must be positive and finite: load a sound state into it, or make a new one";

// "rank 1 rejected a message from rank 0 ..." with both values and advice.
std::string describe(const Verdict& verdict);
// The kind of the error that it is.
ErrorKind kind_of(const Fault& fault);

// Why a collective failed, as far as this rank can find out.
struct Loss {
  std::optional<Error> error;     // of the rank that failed first, if one reported it
  std::vector<uint32_t> missing;  // ranks that neither wait nor reported a failure
  bool store_answers = false;
};

// The error on `rank` for a collective that failed with `reason`, if a peer sends a message of
// another size there, as sockets say it.
std::optional<Error> other_size(uint32_t rank, Phase phase, uint64_t step, uint64_t number,
                                const std::string& reason);

// The error on `rank` for a collective that failed with `reason`: the error that another rank
// reported, else the missing ranks. `number` is that of the chunk, or of the bucket for a commit.
Error lost_contact(const Loss& loss, uint32_t rank, Phase phase, uint64_t step, uint64_t number,
                   const std::string& reason);

enum class Reason : uint8_t {
  kClosed,   // the other end closed the connection, or does not listen
  kTimeout,  // nothing came in time
  kOther,
};

inline Reason reason_of(const std::string& text) {
  const auto has = [&](const char* words) { return text.find(words) != std::string::npos; };
  if (has("by peer") || has("roken pipe") || has("efused")) return Reason::kClosed;
  return has("imed out") || has("imeout") ? Reason::kTimeout : Reason::kOther;
}

// Without the source locations, addresses and calls that gloo names.
inline std::string plain_reason(const std::string& text) {
  switch (reason_of(text)) {
    case Reason::kClosed: return "its connection was closed";
    case Reason::kTimeout: return "nothing came within the timeout";
    default: return text.substr(0, text.find('\n'));
  }
}

}  // namespace gradferry
