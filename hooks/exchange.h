// The flat exchange: scatter-reduce and all-gather of packed messages between all ranks, with a
// header before every payload and a commit after every bucket. Knows messages, not numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradferry/codec.h"
#include "gradferry/error.h"
#include "gradferry/wire.h"
#include "lane.h"
#include "peers.h"
#include "plan.h"
#include "used_parameters.h"

namespace gradferry {

// What both sides of a message must agree on.
struct Agreement {
  uint32_t rank;
  uint32_t world_size;
  uint64_t config_hash;
  uint64_t layout_hash;
};

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

// What a collective that failed for `reason` means to `rank`: what another rank told, else who is
// missing. `number` is the chunk's, of a commit the bucket's. Takes a second or two.
Error lost_contact(Peers& peers, uint32_t rank, Phase phase, uint64_t step, uint64_t number,
                   const std::string& reason);

// Every rank's verdict, equal on all ranks: the fault of the lowest rank that reports one.
// `reporter` is set to that rank. `received`, in host memory, begins with the commits of all ranks,
// with a map of `num_used` parameters each.
Fault read_commit(const Agreement& agreement, const at::Tensor& received, uint64_t step,
                  uint64_t bucket, uint32_t* reporter, size_t num_used = 0);

// A CommitRecord and a map of used parameters; no map of none.
uint64_t commit_bytes(size_t num_used);
// Which parameters some rank used, from commits that read_commit() found no fault in.
UsedMap read_used(const at::Tensor& received, uint32_t world_size, size_t num_used);

// A check of parameters: one message per rank, of this many bytes, with its hashes. In host memory.
// `next_chunk` is the number of the chunk that follows.
uint64_t hash_message_bytes(size_t num_parameters);
void write_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::vector<uint64_t>& own, std::byte* message);
// Returns the first message that cannot be trusted; `by_rank` is not to be read then.
Fault read_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::byte* received, size_t num_parameters,
                  std::vector<std::vector<uint64_t>>& by_rank);

// Buffers of one chunk in flight, allocated once. uint8, in host memory.
struct Slot {
  at::Tensor scatter_send, scatter_receive, gather_send, gather_receive;
};

// One chunk on its way through the exchange.
struct Chunk {
  const ChunkPlan* plan = nullptr;
  Slot* slot = nullptr;
  uint64_t number = 0;
  uint64_t step = 0;
  Pending scatter;
  Pending gather;
};

// Offsets into the messages of a chunk, one of up to `message_bytes` per rank, have 32 bits.
void expect_offsets_fit(uint64_t message_bytes, uint32_t world_size);

// Bytes a slot needs for chunks whose largest message has `message_bytes`.
Slot make_slot(uint32_t world_size, uint64_t message_bytes);

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

  // Sends the payloads in slot.scatter_send; checksums[p] belongs to the message for rank p.
  void post_scatter(Chunk& chunk, WireStatus status, const std::vector<uint64_t>& checksums);
  // Returns the first message that cannot be trusted, by rank.
  Fault wait_scatter(Chunk& chunk);
  // Where the payload for this owner from `rank` lies, after wait_scatter.
  const std::byte* scattered_payload(const Chunk& chunk, uint32_t rank) const;

  // Sends the payload in slot.gather_send, after its header.
  void post_gather(Chunk& chunk, WireStatus status, uint64_t checksum);
  Fault wait_gather(Chunk& chunk);

  // One record per rank, with its map; `send` and `receive` are uint8 of commit_bytes(used.size())
  // and world_size times as many bytes.
  Pending post_commit(at::Tensor send, at::Tensor receive, uint64_t step, uint64_t bucket,
                      const Fault& fault, const UsedMap& used);

  // Sends hashes of this rank's parameters, and puts every rank's into `by_rank`. Waits for all
  // ranks. Returns the first message that cannot be trusted; `by_rank` is not to be read then.
  Fault gather_hashes(const std::vector<uint64_t>& own, uint64_t step, uint64_t next_chunk,
                      std::vector<std::vector<uint64_t>>& by_rank);

  // Waits for a collective; throws Error(kPeer), saying where, when a peer has failed, is gone or
  // too slow.
  void wait(const Pending& work, Phase phase, uint64_t step, uint64_t number) const;

 private:
  Agreement agreement_;
  Peers& peers_;
  Lane& scatter_lane_;
  Lane& gather_lane_;
  Lane& commit_lane_;
};

}  // namespace gradferry
