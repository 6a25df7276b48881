#include "tests/faults/sim/play.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "tests/faults/sim/network.h"
#include "tests/faults/sim/rank.h"
#include "tests/faults/sim/scheduler.h"

namespace gradferry::sim {
namespace {

class SimulatedHost final : public Host {
 public:
  SimulatedHost(const World& world_played, const Playing& how, Network& network)
      : Host(world_played, how), network_(network) {}

  std::vector<std::shared_ptr<Lane>> lanes(
      uint32_t rank, const std::vector<std::vector<uint32_t>>& ranks) override {
    std::vector<std::shared_ptr<Lane>> made(ranks.size());
    for (uint32_t index = 0; index < ranks.size(); ++index) {
      if (!ranks[index].empty()) made[index] = network_.lane(index, rank, ranks[index]);
    }
    return made;
  }
  std::optional<uint64_t> sent_bytes(uint32_t rank) const override {
    return network_.sent_bytes(rank);
  }
  // What another thread asks it may only between two switches, so it would see nothing new.
  void watch(const std::shared_ptr<HostEngine>& /*engine*/) override {}

 private:
  Network& network_;
};

}  // namespace

Seen play(const World& world, const Playing& playing) {
  Scheduler scheduler(playing.order_seed);
  const TimePoint begin = scheduler.time();
  Fault fault;
  if (playing.goes_wrong) fault = world.fault;
  fault.message = playing.fault_message;
  Network network(scheduler, kTimeout, fault);
  SimulatedHost host(world, playing, network);
  Seen seen;
  seen.ranks.resize(world.size);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (uint32_t rank = 0; rank < world.size; ++rank) {
    ranks.push_back(std::make_unique<Rank>(host, rank, seen.ranks[rank]));
    scheduler.start(rank, "train", [&, rank] { ranks[rank]->run(); });
  }
  scheduler.run();
  // What a killed rank holds is not touched again.
  for (uint32_t rank = 0; rank < world.size; ++rank) {
    if (!scheduler.has_stopped(rank)) continue;
    [[maybe_unused]] const Rank* left_alone = ranks[rank].release();
  }
  for (const RankSeen& rank : seen.ranks) {
    if (!rank.has_ended) continue;
    seen.duration = std::max(
        seen.duration, std::chrono::duration_cast<std::chrono::milliseconds>(rank.end - begin));
  }
  seen.num_messages = network.num_messages();
  seen.befallen = network.has_befallen();
  return seen;
}

}  // namespace gradferry::sim
