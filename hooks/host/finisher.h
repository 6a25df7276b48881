// The finishing half of the host's engine: what becomes of a chunk after it was encoded and posted.
// Its thread does the oldest thing that can be done, so that buckets complete in their order:
//
//   wait for a scatter -> reduce -> post the gather
//   wait for a gather -> decode into the bucket -> after the last chunk post the commit
//   wait for a commit -> complete the bucket's Future
//
// Owns the slots: the thread that DDP calls from takes one, fills and posts it, and hands it in.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine_life.h"
#include "engine_options.h"
#include "events.h"
#include "host/chunk_codecs.h"
#include "host/exchange.h"
#include "host/host_residuals.h"
#include "host/jobs.h"
#include "host/residual_sample.h"
#include "layout.h"

namespace gradferry {

// Chunks in flight. Four keep both lanes busy: one is encoded, one scattered, two gathered.
inline constexpr size_t kHostSlots = 4;
// All-gathers in flight: with two, one travels while the other is decoded.
inline constexpr size_t kGathersInFlight = 2;
// Commits in flight: nobody waits for one until all are under way.
inline constexpr size_t kCommitSlots = 8;

class Finisher {
 public:
  // Allocates the workspace, and counts it. Everything outlives the finisher.
  Finisher(const EngineOptions& options, const Layout& layout, HostResiduals& residuals,
           const ResidualSample& sample, Exchange& exchange, EventLog& log, EngineLife& life);

  // The thread that DDP calls from. take_slot() blocks while all are in use; both throw the
  // engine's error once it has one.
  Slot* take_slot();
  void hand_in(std::unique_ptr<ChunkJob> job);

  // The finishing thread's life: until it is told to stop and nothing is in flight, or until the
  // first error, which all ranks get to know and with which every bucket in flight fails. Returns
  // whether it ended with one, once run() of the engine is over.
  bool work();

 private:
  struct Commit {
    std::shared_ptr<BucketJob> bucket;
    at::Tensor receive;
    Pending work;
  };

  bool do_oldest();
  bool next_chunk(std::unique_ptr<ChunkJob>& next);
  void reduce(std::unique_ptr<ChunkJob> job);
  uint64_t reduce_payloads(const ChunkJob& job);
  void decode(std::unique_ptr<ChunkJob> job);
  void decode_messages(const ChunkJob& job);
  void post_commit(std::shared_ptr<BucketJob> bucket);
  void finish_commit();
  void put_back_unused(const Commit& commit) const;
  void complete(BucketJob& bucket);
  Fault local_fault(const ChunkJob& job, Phase phase) const;
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
  std::vector<std::pair<at::Tensor, at::Tensor>> commit_slots_;  // send, receive

  // The finishing thread's own.
  ChunkCodecs codecs_;
  std::deque<std::unique_ptr<ChunkJob>> gathers_;
  std::deque<Commit> commits_;

  // Between both threads, under life_.mutex.
  std::deque<std::unique_ptr<ChunkJob>> queue_;
  std::vector<Slot*> free_slots_;
};

}  // namespace gradferry
