// The exchange of packed messages, with a header before every payload and a commit after every
// bucket. Does not interpret payloads.
//
//   local scatter   every rank sends its siblings the gradients of their rails    (local lanes)
//   scatter         every rank sends its peers the payloads that they own
//   gather          every rank sends its peers the payload of the mean of what it owns
//   forward         every rank sends its siblings what it gathered, as it came      (local lanes)
//
// With one rank per node all ranks are peers, and nothing is local. A reduce-scatter ends with the
// scatter, and an all-gather is the gather alone. Where siblings share memory, only headers are
// sent between them. A header says that what belongs to it is there, and is sent after it was
// written; the kernel's lock on a connection's queue puts the write before the read.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "host/shared_memory.h"
#include "lane.h"
#include "peers.h"
#include "protocol/messages.h"
#include "protocol/nodes.h"
#include "protocol/plan.h"
#include "protocol/workspace.h"

namespace gradferry {

// Buffers of one chunk in flight, allocated once. uint8, in host memory.
//
// In memory that siblings share, chunk n is in slot n % slots on all of them. What a rank writes
// for chunk n + slots, nobody reads any more for chunk n:
//   dense_shared  this rank has decoded chunk n, so all siblings forwarded it, after they had added
//   gathered      all siblings have posted chunk n + slots, each after it had decoded chunk n
struct Slot {
  at::Tensor dense_send, dense_receive;  // between siblings; where they share memory, only headers
  at::Tensor dense_shared;               // then: gradients, for every rail from its other ranks
  uint64_t dense_place_bytes = 0;        // apart
  at::Tensor sum;                        // of the node's gradients, of this rank's rail
  at::Tensor scatter_send, scatter_receive;
  // What decode reads; may be what siblings share. Empty in a reduce-scatter, and where all that is
  // gathered is kept.
  at::Tensor gathered;
};

// `memory`: null where siblings share none; else it has all slots, of which this is `number`.
Slot make_slot(const Workspace& workspace, SharedMemory* memory, uint64_t number);

// One chunk on its way through the exchange.
struct Chunk {
  const ChunkPlan* plan = nullptr;
  Slot* slot = nullptr;
  at::Tensor gathered{};  // what decode reads: the slot's, or memory that keeps it
  uint64_t number = 0;
  uint64_t step = 0;
  Pending local_scatter;
  Pending scatter;
  Pending gather;
  Pending forward;

  // What it waits for now.
  const Pending& pending() const {
    if (local_scatter) return local_scatter;
    return scatter ? scatter : gather ? gather : forward;
  }
};

// Each between the ranks that it serves, in rank order. Null where this rank has no part.
struct ExchangeLanes {
  std::shared_ptr<Lane> scatter, gather;         // peers
  std::shared_ptr<Lane> commit;                  // all ranks
  std::shared_ptr<Lane> local_scatter, forward;  // siblings; null with one rank per node
  // All ranks; for the thread that posts what begins a chunk.
  std::shared_ptr<Lane> hashes;
};

// cause(): Peers::cause(), which names phase, step and number, and tells the others.
struct Unfinished final : std::exception {
  explicit Unfinished(const std::function<Error()>& find_out) : cause(find_out) {}
  std::function<Error()> cause;
};

class Exchange {
 public:
  Exchange(const Agreement& agreement, const Nodes& nodes, Peers& peers, ExchangeLanes lanes);

  // Closes the lanes: at once, or after a failure when others have had time to read.
  void close(bool failed);

  const Agreement& agreement() const { return agreement_; }
  // What this rank sent to ranks of other nodes, and to those of its own.
  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }
  uint64_t local_bytes() const { return local_bytes_.load(std::memory_order_relaxed); }

  // Sends the gradients in slot.dense_send. Where a rail's begin there:
  std::byte* dense_message(const Chunk& chunk, uint32_t rail) const;
  void post_local_scatter(Chunk& chunk, WireStatus status);
  Fault wait_local_scatter(Chunk& chunk);
  // The gradients of this rank's rail from a sibling, after wait_local_scatter.
  const std::byte* scattered_gradients(const Chunk& chunk, uint32_t sibling) const;

  // Sends the payloads in slot.scatter_send; checksums[k] belongs to the message for node k.
  void post_scatter(Chunk& chunk, WireStatus status, const std::vector<uint64_t>& checksums);
  // Returns the fault of the first message, in rank order, that cannot be trusted.
  Fault wait_scatter(Chunk& chunk);
  // The payload from a node for this owner, in host memory, after wait_scatter.
  const std::byte* scattered_payload(const Chunk& chunk, uint32_t node) const;

  // Where this rank's message for the all-gather lies, header first.
  std::byte* gather_message(const Chunk& chunk) const;
  // Sends it, the payload being there.
  void post_gather(Chunk& chunk, WireStatus status, uint64_t checksum);
  Fault wait_gather(Chunk& chunk);

  void post_forward(Chunk& chunk, WireStatus status);
  Fault wait_forward(Chunk& chunk);

  // Sends this rank's commit record and map to all. `commits` is uint8 of world_size times
  // commit_bytes(used.size()) bytes: one place per rank, of which this rank's is written here.
  // `loss_scale`: as in write_commit().
  Pending post_commit(const at::Tensor& commits, uint64_t step, uint64_t bucket, const Fault& fault,
                      const UsedMap& used, float loss_scale);

  // Sends the hashes of this rank's parameters, and puts every rank's into `by_rank`. Waits for all
  // ranks. Returns the fault of the first message that cannot be trusted; `by_rank` is then
  // unspecified.
  Fault gather_hashes(const std::vector<uint64_t>& hashes, uint64_t step, uint64_t next_chunk,
                      std::vector<std::vector<uint64_t>>& by_rank);

  // Waits for a collective. Throws Unfinished when a peer has failed, is gone or is too slow.
  void wait(const Pending& work, Phase phase, uint64_t step, uint64_t number) const;
  // Whether a collective has ended well, or does so at once.
  static bool has_come(const Pending& work);

 private:
  Envelope envelope(const Chunk& chunk, Phase phase) const {
    return agreement_.envelope(chunk.step, chunk.number, phase, chunk.plan->tiles_hash);
  }
  // How long siblings' messages are on a lane: memory that they share has what follows headers.
  std::vector<int64_t> on_lane(const Chunk& chunk, const std::vector<PlannedMessage>& all) const;
  // Where a sibling's gradients for a rail that is not its own begin.
  std::byte* dense_place(const Slot& slot, uint32_t sibling, uint32_t rail) const;
  // This rank's message in a gather.
  const PlannedMessage& own_gathered(const Chunk& chunk) const {
    return chunk.plan->rails[local_index_].gathered[node_];
  }
  Fault check_gathered(const Chunk& chunk, uint32_t rail) const;
  void count(uint64_t to_peers, uint64_t to_siblings);
  // Sends to all ranks.
  Pending post_to_all(Lane& lane, const at::Tensor& messages);
  // Where all siblings' messages of these sizes lie.
  at::Tensor forwarded(const Chunk& chunk, const std::vector<int64_t>& sizes) const;

  Agreement agreement_;
  const Nodes& nodes_;
  const std::vector<uint32_t> siblings_;
  const uint32_t node_, local_index_;
  std::vector<std::vector<uint32_t>> rails_;  // ranks of every rail, by node
  Peers& peers_;
  ExchangeLanes lanes_;
  std::atomic<uint64_t> sent_bytes_{0}, local_bytes_{0};
};

}  // namespace gradferry
