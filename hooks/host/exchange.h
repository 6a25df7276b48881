// The flat exchange: scatter-reduce and all-gather of packed messages between all ranks, with a
// header before every payload and a commit after every bucket. Does not interpret payloads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "lane.h"
#include "messages.h"
#include "peers.h"
#include "plan.h"
#include "used_parameters.h"
#include "workspace.h"

namespace gradferry {

// Buffers of one chunk in flight, allocated once. uint8, in host memory.
struct Slot {
  at::Tensor scatter_send, scatter_receive;
  at::Tensor gathered;     // of all ranks; may be scatter_receive
  at::Tensor own_message;  // then: this rank's, which else is written to its place in `gathered`
};

Slot make_slot(const Workspace& workspace);

// One chunk on its way through the exchange.
struct Chunk {
  const ChunkPlan* plan = nullptr;
  Slot* slot = nullptr;
  uint64_t number = 0;
  uint64_t step = 0;
  Pending scatter;
  Pending gather;
};

class Exchange {
 public:
  Exchange(const Agreement& agreement, Peers& peers, Lane& scatter_lane, Lane& gather_lane,
           Lane& commit_lane)
      : agreement_(agreement),
        peers_(peers),
        scatter_lane_(scatter_lane),
        gather_lane_(gather_lane),
        commit_lane_(commit_lane) {}

  const Agreement& agreement() const { return agreement_; }
  // What this rank sent to others.
  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }

  // Sends the payloads in slot.scatter_send; checksums[p] belongs to the message for rank p.
  void post_scatter(Chunk& chunk, WireStatus status, const std::vector<uint64_t>& checksums);
  // Returns the fault of the first message, in rank order, that cannot be trusted.
  Fault wait_scatter(Chunk& chunk);
  // The payload from `rank` for this owner, in host memory, after wait_scatter.
  const std::byte* scattered_payload(const Chunk& chunk, uint32_t rank) const;

  // Where this rank's message for the all-gather lies, header first.
  std::byte* gather_message(const Chunk& chunk) const;
  // Sends it, the payload being there.
  void post_gather(Chunk& chunk, WireStatus status, uint64_t checksum);
  Fault wait_gather(Chunk& chunk);

  // Sends this rank's commit record and map to all. `commits` is uint8 of world_size times
  // commit_bytes(used.size()) bytes: one place per rank, of which this rank's is written here.
  Pending post_commit(const at::Tensor& commits, uint64_t step, uint64_t bucket, const Fault& fault,
                      const UsedMap& used);

  // Sends the hashes of this rank's parameters, and puts every rank's into `by_rank`. Waits for all
  // ranks. Returns the fault of the first message that cannot be trusted; `by_rank` is then
  // unspecified.
  Fault gather_hashes(const std::vector<uint64_t>& hashes, uint64_t step, uint64_t next_chunk,
                      std::vector<std::vector<uint64_t>>& by_rank);

  // Waits for a collective. Throws Error(kPeer), which names phase, step and number, when a peer
  // has failed, is gone or is too slow.
  void wait(const Pending& work, Phase phase, uint64_t step, uint64_t number) const;
  // Whether a collective has ended well, or does so at once.
  static bool has_come(const Pending& work);

 private:
  // Where all-gathered messages have this rank's.
  std::byte* own_place(const Chunk& chunk) const;
  // `messages`: a place for every rank. `own`: this rank's place, or elsewhere.
  Pending post_all_gather(Lane& lane, const at::Tensor& messages, const at::Tensor& own);
  Pending post_all_gather(Lane& lane, const at::Tensor& messages);

  Agreement agreement_;
  Peers& peers_;
  Lane& scatter_lane_;
  Lane& gather_lane_;
  Lane& commit_lane_;
  std::atomic<uint64_t> sent_bytes_{0};
};

}  // namespace gradferry
