// The finishing half of the host's engine: it processes a chunk after DDP's thread has encoded and
// posted it. Its thread always does the oldest possible job, so that buckets complete in order:
//
//   wait for a scatter -> reduce -> post the gather
//   wait for a gather -> decode into the bucket -> after the last chunk post the commit
//   wait for a commit -> complete the bucket's Future
//
// In a reduce-scatter the first line ends in the bucket, and there is no second one. An all-gather
// begins with the second one, and completes the Future before it waits for the commit: unless this
// rank has seen a fault, the bucket is right, and the commit can travel beside what follows.
//
// With several ranks per node a local scatter comes first, to be summed and encoded, and what was
// gathered is forwarded before it is decoded. With four things to wait for, the oldest job can be
// one that a sibling has not come to: so whatever has come is done first, and only then is the
// oldest chunk waited for, which every rank has posted or will post without waiting for a newer
// one.
//
// Owns the slots: the thread on which DDP calls the hook takes one, fills it, posts it, and passes
// the chunk to the pipeline.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine_life.h"
#include "engine_options.h"
#include "events.h"
#include "host/chunk_codecs.h"
#include "host/exchange.h"
#include "host/host_residuals.h"
#include "host/jobs.h"
#include "host/residual_sample.h"
#include "protocol/layout.h"

namespace gradferry {

// Commits in flight: the pipeline waits for one only if it has nothing else to do, or all are in
// use.
inline constexpr size_t kCommitSlots = 8;

// Bytes that the siblings of options.rank must share, for `memory` of an engine with the options.
// Throws what the engine would.
uint64_t shared_memory_bytes(const EngineOptions& options);

class BucketPipeline {
 public:
  // Allocates the workspace and adds it to the stats. `memory`: what this rank shares with its
  // siblings, or null. All other arguments outlive the pipeline.
  BucketPipeline(const EngineOptions& options, const Layout& layout, HostResiduals& residuals,
                 const ResidualSample& sample, Exchange& exchange, SharedMemory* memory,
                 EventLog& log, EngineLife& life);

  // For the thread on which DDP calls the hook. take_slot() blocks while all slots are in use. Both
  // throw the engine's error after it has failed.
  Slot* take_slot();
  void hand_in(std::unique_ptr<ChunkJob> job);

  // Encodes a chunk and posts its scatter, with `status` unless that fails; or, in an all-gather,
  // its gather. On the thread that owns `codecs`.
  void send_to_peers(ChunkJob& job, ChunkCodecs& codecs, WireStatus status);
  void send_to_all(ChunkJob& job, ChunkCodecs& codecs);

  // The body of the finishing thread. Returns false when it was asked to stop and nothing is in
  // flight. After the first error it informs all ranks, fails every bucket in flight, waits until
  // the engine's run() has ended, and returns true.
  bool work();

 private:
  struct Commit {
    std::shared_ptr<BucketJob> bucket;
    at::Tensor records;
    Pending work;
  };

  // What a chunk waits for, in order.
  enum PipelineStage : uint8_t { kLocalScatter, kScatter, kGather, kForward, kStages };
  using Chunks = std::deque<std::unique_ptr<ChunkJob>>;

  Error cause_of(Error error);
  bool do_oldest();
  bool take_handed_in();
  bool is_idle() const;
  std::optional<size_t> next_stage() const;
  std::optional<size_t> next_stage_of_peers() const;
  void advance(size_t stage);
  void sum(ChunkJob& job);
  void reduce(ChunkJob& job);
  uint64_t reduce_payloads(const ChunkJob& job);
  void forward(ChunkJob& job);
  void decode(ChunkJob& job);
  void free_slot(const ChunkJob& job);
  void decode_messages(const ChunkJob& job);
  void post_commit(std::shared_ptr<BucketJob> bucket);
  void finish_commit();
  void put_back_unused(const Commit& commit) const;
  void complete(BucketJob& bucket);
  void deliver_early();
  void deliver(BucketJob& bucket);
  Fault local_fault(const ChunkJob& job, Phase phase) const;
  void note_encode_error(ChunkJob& job, Phase phase) const;
  ChunkCodecs::Work work_of(const ChunkJob& job) const;
  void fail_all(const Error& error);
  std::vector<std::shared_ptr<BucketJob>> take_all_buckets();

  const EngineOptions& options_;
  const Layout& layout_;
  HostResiduals& residuals_;
  const ResidualSample& sample_;
  Exchange& exchange_;
  EventLog& log_;
  EngineLife& life_;

  std::vector<Slot> slots_;
  std::vector<at::Tensor> commit_slots_;  // records of all ranks

  // Only for the finishing thread.
  ChunkCodecs codecs_;
  std::array<Chunks, kStages> waiting_;
  std::deque<Commit> commits_;

  // Shared by both threads, under life_.mutex.
  Chunks queue_;
  std::deque<Slot*> free_slots_;  // the one used last is the last
};

}  // namespace gradferry
