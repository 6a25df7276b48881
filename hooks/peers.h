// What the ranks of one attach say to each other when a collective does not come: through the store
// of the process group, beside the connections that no longer serve. As long as collectives end
// within a second nothing is written and nothing is read. Keys:
//
//   present/<rank>   "1": that rank waits for others, or has failed; "0": no longer
//   lost             how many ranks have lost contact
//   told, error      the first failure: who counts `told` up first writes `error`, for all
//
// A store may never answer: its server may be gone, or stand still. So it is asked on a thread of
// its own, and for a few seconds at most.
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
  std::string error;              // of the rank that failed first; empty: none said anything
  std::vector<uint32_t> missing;  // ranks that neither wait nor have said that they failed
  bool store_answers = false;
};

// Safe to use from any thread.
class Peers {
 public:
  // `store`: with a prefix that is equal on all ranks and used for nothing else; null: there is
  // nobody to talk to.
  Peers(c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size);
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // Waits for a collective. Throws what the collective throws, or Error(kPeer) within about a
  // second of another rank's failure; then `work` is still under way.
  void wait(c10d::Work& work);

  // Tells all ranks that this one has failed: the first line of `error`. Once; further calls do
  // nothing.
  void tell(const std::string& error);

  // To be called after wait() threw. The first rank that calls it looks for at most a second who
  // else calls or waits; the others wait for what it tells.
  Loss look_around();

 private:
  using Question = std::function<std::string(c10d::Store&)>;
  // None: no answer in time.
  std::optional<std::string> ask(Question question, std::chrono::milliseconds longest);
  void say_present(bool present);

  const c10::intrusive_ptr<c10d::Store> store_;
  const uint32_t rank_;
  const uint32_t world_size_;
  std::atomic<bool> told_{false};
  std::atomic<int> silent_waits_{0};

  std::mutex mutex_;
  std::shared_ptr<Worker> worker_;         // from the first silence on
  std::shared_ptr<std::atomic<int>> busy_  // questions that the store has not answered yet
      = std::make_shared<std::atomic<int>>(0);
};

}  // namespace gradferry
