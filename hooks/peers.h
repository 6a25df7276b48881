// How the ranks of one attach exchange errors when a collective does not complete: through the
// store of the process group, since their connections may no longer work. The store is not used
// while collectives complete within a second. Keys:
//
//   present/<rank>   "1": that rank waits for others, or has failed; "0": no longer
//   lost             how many ranks have lost their connections
//   told, error      the first failure: the rank that first increments `told` writes `error`, and
//   kind             before it: "protocol", or nothing
//
// A store may never answer: its server may have ended, or hang. So a separate thread asks it, and
// callers wait a few seconds at most.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "background_thread.h"
#include "gradferry/error.h"
#include "protocol/faults.h"
#include "torch_compat.h"

namespace gradferry {

// Safe to use from any thread.
class Peers {
 public:
  // `store`: with a prefix that is equal on all ranks and used for nothing else; null: there are no
  // other ranks. `world_ranks`: of the others, and of this one.
  Peers(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size,
        WorldRanks world_ranks = {});
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // The number of a rank in the default group, by which errors name it.
  uint32_t in_world(uint32_t rank) const { return gradferry::in_world(world_ranks_, rank); }
  Verdict in_world(Verdict verdict) const;

  // Waits for a collective. Throws what the collective throws, or Error(kPeer) within about a
  // second of another rank's failure; `work` is then still in flight.
  void wait(c10d::Work& work);

  // Reports the failure of this rank to all ranks: the first line of `error`. Only the first call
  // has an effect.
  void tell(const std::string& error, ErrorKind kind = ErrorKind::kPeer);

  // The error of this rank after wait() threw with `reason`; `number` as in lost_contact(). Takes a
  // second or two where a rank is gone.
  Error cause(Phase phase, uint64_t step, uint64_t number, const std::string& reason);

 private:
  // Reports `error`, which several ranks may see, each from its side. Returns the failure that was
  // reported first, so that all ranks raise the same one.
  Error tell_or_hear(const Error& error);
  // Call it after wait() threw. The first rank that calls it spends at most a second to find out
  // which ranks also call it or wait; the others wait for its report.
  Loss look_around();

  using Question = std::function<std::string(c10d::Store&)>;
  // Returns nothing when there was no answer in time.
  std::optional<std::string> ask(Question question, std::chrono::milliseconds longest);
  void say_present(bool present);

  const c10::intrusive_ptr<c10d::Store> store_;
  const uint32_t rank_;
  const uint32_t world_size_;
  const WorldRanks world_ranks_;
  std::atomic<bool> told_{false};
  std::atomic<int> silent_waits_{0};

  std::mutex mutex_;
  std::shared_ptr<Worker> worker_;  // started when a collective first takes over a second
  // Shared with questions that outlive this object.
  struct Asked {
    std::atomic<int> unanswered{0};
    std::atomic<bool> silent{false};  // the last one took too long
  };
  std::shared_ptr<Asked> asked_ = std::make_shared<Asked>();
};

}  // namespace gradferry
