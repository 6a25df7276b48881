// How the ranks of one attach exchange errors when a collective does not complete: through the
// store of the process group, since their connections may no longer work. As long as collectives
// complete within a second, the store is not used. Keys:
//
//   present/<rank>   "1": that rank waits for others, or has failed; "0": no longer
//   lost             how many ranks have lost their connections
//   told, error      the first failure: the rank that first increments `told` writes `error`
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

#include "torch_compat.h"
#include "worker.h"

namespace gradferry {

// Why a collective failed, as far as this rank can find out.
struct Loss {
  std::string error;              // of the rank that failed first; empty: none reported one
  std::vector<uint32_t> missing;  // ranks that neither wait nor reported a failure
  bool store_answers = false;
};

// Safe to use from any thread.
class Peers {
 public:
  // `store`: with a prefix that is equal on all ranks and used for nothing else; null: there are no
  // other ranks.
  Peers(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Waits for a collective. Throws what the collective throws, or Error(kPeer) within about a
  // second of another rank's failure; `work` is then still in flight.
  void wait(c10d::Work& work);

  // Reports the failure of this rank to all ranks: the first line of `error`. Only the first call
  // has an effect.
  void tell(const std::string& error);

  // Call it after wait() threw. The first rank that calls it spends at most a second to find out
  // which ranks also call it or wait; the others wait for its report.
  Loss look_around();

 private:
  using Question = std::function<std::string(c10d::Store&)>;
  // Returns nothing when there was no answer in time.
  std::optional<std::string> ask(Question question, std::chrono::milliseconds longest);
  void say_present(bool present);

  const c10::intrusive_ptr<c10d::Store> store_;
  const uint32_t rank_;
  const uint32_t world_size_;
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
