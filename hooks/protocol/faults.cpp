#include "protocol/faults.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <vector>

namespace gradferry {
namespace {

constexpr const char* kOrder =
    "the ranks no longer run the same sequence of buckets: check that every rank runs the same "
    "model, the same number of backward passes, and resumed from the same checkpoint";

struct FieldText {
  const char* field;
  const char* advice;
};

// " (step 3, chunk 12, gather)"
std::string place_of(Phase phase, uint64_t step, uint64_t number) {
  const bool commit = phase == Phase::kCommit;
  const auto name_of = [](Phase p) {
    switch (p) {
      case Phase::kScatter: return "scatter";
      case Phase::kCommit: return "commit";
      case Phase::kParameters: return "check of parameters";
      case Phase::kLocalScatter: return "local scatter";
      case Phase::kForward: return "forward";
      default: return "gather";
    }
  };
  const char* name = name_of(phase);
  return " (step " + std::to_string(step) + (commit ? ", bucket " : ", chunk ") +
         std::to_string(number) + ", " + name + ")";
}

// "rank 1" of "rank 1: connection closed by peer", as sockets say it.
std::string rank_in(const std::string& reason) {
  const size_t colon = reason.find(':');
  const bool named = reason.starts_with("rank ") && colon != std::string::npos;
  return named ? reason.substr(0, colon) : "another rank";
}

FieldText text_of(WireStatus status) {
  constexpr const char* kForeign =
      "something else used gradferry's connections, or bytes were damaged on the way";
  switch (status) {
    case WireStatus::kBadMagic: return {"magic", kForeign};
    case WireStatus::kBadVersion: return {"wire version", "install one gradferry on all ranks"};
    case WireStatus::kBadPhase: return {"phase", kOrder};
    case WireStatus::kBadSource: return {"source rank", kForeign};
    case WireStatus::kBadConfig: return {"configuration hash", kOrder};
    case WireStatus::kBadLayout: return {"layout hash", kOrder};
    case WireStatus::kBadStep: return {"step", kOrder};
    case WireStatus::kBadChunk: return {"chunk", kOrder};
    case WireStatus::kBadPayloadBytes: return {"payload bytes", kOrder};
    case WireStatus::kBadChecksum:
      return {"checksum", "bytes were damaged on the way; check the network and the memory"};
    case WireStatus::kCorruptPayload:
      return {"number of corrupt tiles", "the sender's codec misbehaves; please report it"};
    default: return {"status", "see the error of that rank"};
  }
}

std::string loss_scale_text(uint64_t bits) {
  std::ostringstream text;
  text << std::bit_cast<float>(static_cast<uint32_t>(bits));
  return text.str();
}

// The reporter is the rank whose scale it is, the fault's rank the one it was compared with.
std::string describe_loss_scale(const Verdict& verdict) {
  const auto& [fault, reporter, step] = verdict;
  const std::string rank = std::to_string(reporter), at = " at step " + std::to_string(step);
  const std::string scale = loss_scale_text(fault.received);
  if (!is_loss_scale(fault.received)) {
    return "the scale of rank " + rank + "'s GradScaler is " + scale + at + kUnsoundLossScale;
  }
  return "rank " + rank + " differs from rank " + std::to_string(fault.rank) +
         " in the scale of its GradScaler" + at + ": " + scale + " instead of " +
         loss_scale_text(fault.expected) +
         ", so their gradients have no common average; load one state into the GradScalers of all "
         "ranks, and let all of them call update() after every step; with uneven inputs use "
         "join(throw_on_early_termination=True), because a rank without input does not call it";
}

}  // namespace

bool is_loss_scale(uint64_t bits) {
  constexpr uint32_t kInfinity = 0x7F800000;
  return bits > 0 && bits < kInfinity;
}

ErrorKind kind_of(const Fault& fault) {
  switch (fault.status) {
    case WireStatus::kLocalFailure: return ErrorKind::kPeer;
    case WireStatus::kBadLossScale:
      return is_loss_scale(fault.received) ? ErrorKind::kRankMismatch : ErrorKind::kState;
    default: return ErrorKind::kProtocol;
  }
}

std::string name_ranks(const std::vector<uint32_t>& ranks) {
  constexpr size_t kShown = 8;
  const size_t shown = std::min(ranks.size(), kShown);
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < shown; ++i) {
    const bool last = i + 1 == ranks.size();
    text += (i == 0 ? "" : last ? " and " : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > shown) text += " and " + std::to_string(ranks.size() - shown) + " more";
  return text;
}

std::string describe(const Verdict& verdict) {
  const auto& [fault, reporter, step] = verdict;
  if (fault.status == WireStatus::kBadLossScale) return describe_loss_scale(verdict);
  const std::string where = place_of(fault.phase, step, fault.chunk);
  if (fault.status == WireStatus::kLocalFailure) {
    return "rank " + std::to_string(reporter) + " failed while it compressed gradients" + where +
           "; the reason is in that rank's own error";
  }
  FieldText text = text_of(fault.status);
  if (fault.phase == Phase::kCommit && fault.status == WireStatus::kBadChunk) text.field = "bucket";
  return "rank " + std::to_string(reporter) + " rejected a message from rank " +
         std::to_string(fault.rank) + where + ": " + text.field + " is " +
         std::to_string(fault.received) + ", expected " + std::to_string(fault.expected) + "; " +
         text.advice;
}

std::optional<Error> other_size(uint32_t rank, Phase phase, uint64_t step, uint64_t number,
                                const std::string& reason) {
  if (reason.find(" sends a message of ") == std::string::npos) return std::nullopt;
  return Error(ErrorKind::kProtocol, "rank " + std::to_string(rank) + " rejected a message" +
                                         place_of(phase, step, number) + ": " + reason + "; " +
                                         kOrder);
}

Error lost_contact(const Loss& loss, uint32_t rank, Phase phase, uint64_t step, uint64_t number,
                   const std::string& reason) {
  if (loss.error) return *loss.error;
  std::string text = "rank " + std::to_string(rank) + " lost contact with " +
                     (loss.missing.empty() ? rank_in(reason) : name_ranks(loss.missing)) +
                     place_of(phase, step, number) + ": " + plain_reason(reason);
  if (!loss.store_answers) {
    text += ", and the store does not answer (usually rank 0 serves it)";
  }
  return {ErrorKind::kPeer, text +
                                "; look at the other ranks' errors first (a rank without an error "
                                "ended earlier), then restart"};
}

}  // namespace gradferry
