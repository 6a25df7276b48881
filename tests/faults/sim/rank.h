// One rank of a world: its training on a real engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hooks/host/host_engine.h"
#include "hooks/host/shared_memory.h"
#include "tests/faults/sim/play.h"

namespace gradferry::sim {

// What all ranks of a world have in common. Ranks use it from threads of their own.
class Host {
 public:
  Host(const World& world_played, const Playing& how);
  virtual ~Host() = default;
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  // `rank`'s ends of lanes, by LaneIndex. `ranks`: which each connects; none: null.
  virtual std::vector<std::shared_ptr<Lane>> lanes(
      uint32_t rank, const std::vector<std::vector<uint32_t>>& ranks) = 0;
  // What a rank sent; nothing: nobody counts.
  virtual std::optional<uint64_t> sent_bytes(uint32_t rank) const = 0;
  // May ask this engine from other threads while it trains.
  virtual void watch(const std::shared_ptr<HostEngine>& engine) = 0;

  const World& world;
  const Playing& playing;
  const c10::intrusive_ptr<c10d::Store> store;
  const std::vector<std::shared_ptr<SharedMemory>> memory;  // by rank; null: it shares none
};

class Rank {
 public:
  Rank(Host& host, uint32_t rank, RankSeen& seen)
      : host_(host), world_(host.world), rank_(rank), seen_(seen) {}

  // On a thread of the rank's.
  void run();

 private:
  void start();
  ExchangeLanes lanes() const;
  void train();
  void step(uint64_t number);
  void prepare(uint64_t number);
  std::vector<FuturePtr> hand_over(uint64_t number, std::vector<at::Tensor>& gradients);
  at::Tensor gradient(uint64_t number, const std::vector<uint32_t>& bucket) const;
  void wait_for(const FuturePtr& future);
  void learn(uint64_t number, const std::vector<at::Tensor>& gradients);
  void expect_bytes_counted() const;
  bool differs_at(uint64_t number, Difference difference) const {
    return host_.playing.goes_wrong && world_.difference == difference &&
           world_.different_rank == rank_ && number == world_.different_step;
  }

  Host& host_;
  const World& world_;
  const uint32_t rank_;
  RankSeen& seen_;
  std::vector<at::Tensor> parameters_;
  at::Tensor loss_scale_;
  std::shared_ptr<HostEngine> engine_;
};

}  // namespace gradferry::sim
