#include "tests/faults/sim/rank.h"

#include <ATen/Functions.h>
#include <ATen/core/jit_type.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

namespace gradferry::sim {
namespace {

Bytes bytes_of(const at::Tensor& tensor) {
  const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {data, data + tensor.nbytes()};
}

// Of all ranks; null where siblings share none.
std::vector<std::shared_ptr<SharedMemory>> share_memory(const World& world) {
  std::vector<std::shared_ptr<SharedMemory>> memory(world.size);
  if (!world.siblings_share) return memory;
  for (const auto& members : world.nodes) {
    if (members.size() == 1) continue;
    const EngineOptions options = world.options(members.front(), false);
    const uint64_t num_bytes = shared_memory_bytes(options);
    const int descriptor = memfd_create("sim", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    const bool made = descriptor >= 0 &&
                      ftruncate(descriptor, static_cast<off_t>(num_bytes)) == 0 &&
                      fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0;
    if (!made) throw std::runtime_error("no memory to share");
    for (const uint32_t rank : members) {
      memory[rank] = std::make_shared<SharedMemory>(descriptor, num_bytes);
    }
    close(descriptor);
  }
  return memory;
}

}  // namespace

Host::Host(const World& world_played, const Playing& how)
    : world(world_played),
      playing(how),
      store(c10::make_intrusive<c10d::HashStore>()),
      memory(share_memory(world_played)) {}

void Rank::run() {
  try {
    start();
    train();
    expect_bytes_counted();
  } catch (const Error& error) {
    seen_.error = error;
    seen_.end = now();
    try {
      if (!engine_) throw Error(error);
      engine_->state();
    } catch (const Error& later) {
      seen_.later_error = later.what();
    }
  }
  if (!seen_.error) seen_.end = now();
  engine_.reset();
  seen_.has_ended = true;
}

void Rank::start() {
  EngineOptions options = world_.options(rank_, host_.playing.goes_wrong);
  if (world_.has_loss_scale) options.loss_scale = loss_scale_ = at::ones({}, at::kFloat);
  options.peers = std::make_shared<Peers>(host_.store, rank_, world_.size);
  for (const ParameterSpec& spec : world_.parameters) {
    constexpr uint64_t kMostElements = 8;  // enough to tell whether ranks are one
    parameters_.push_back(
        at::zeros({static_cast<int64_t>(std::min(spec.num_elements, kMostElements))}));
  }
  engine_ = HostEngine::start(std::move(options), ParameterHashes(parameters_), lanes(),
                              host_.memory[rank_], "simulated");
  host_.watch(engine_);
  if (!host_.playing.states.empty()) {
    engine_->load_state(host_.playing.states[rank_]);
  } else if (!host_.playing.missing.empty()) {
    EngineState begin = engine_->state();
    begin.steps = host_.playing.first_step;
    engine_->load_state(begin);
  }
  for (uint32_t i = 0; i < host_.playing.missing.size(); ++i) {
    auto values = host_.playing.missing[i];
    if (values.empty()) continue;
    engine_->add_to_worker_residual(
        i, at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kFloat), 1.0F);
  }
}

ExchangeLanes Rank::lanes() const {
  if (world_.size == 1) return {};
  const Nodes nodes(world_.nodes);
  std::vector<std::vector<uint32_t>> ranks(kNumLanes);
  ranks[kCommit].resize(world_.size);
  std::iota(ranks[kCommit].begin(), ranks[kCommit].end(), 0);
  ranks[kHashes] = ranks[kCommit];
  if (nodes.is_leader(rank_)) {
    ranks[kScatter] = nodes.peers(nodes.local_index(rank_));
    if (world_.collective == Collective::kAllReduce) ranks[kGather] = ranks[kScatter];
  }
  if (!nodes.is_flat()) ranks[kLocalScatter] = ranks[kForward] = nodes.siblings(rank_);
  auto made = host_.lanes(rank_, ranks);
  ExchangeLanes lanes;
  lanes.scatter = std::move(made[kScatter]);
  lanes.gather = std::move(made[kGather]);
  lanes.commit = std::move(made[kCommit]);
  lanes.local_scatter = std::move(made[kLocalScatter]);
  lanes.forward = std::move(made[kForward]);
  lanes.hashes = std::move(made[kHashes]);
  return lanes;
}

void Rank::train() {
  for (uint64_t number = host_.playing.first_step; number < world_.steps.size(); ++number) {
    step(number);
  }
}

void Rank::step(uint64_t number) {
  prepare(number);
  StepSeen seen;
  if (host_.playing.watched) seen.before = engine_->state();
  std::vector<at::Tensor> gradients;
  const std::vector<FuturePtr> futures = hand_over(number, gradients);
  if (host_.playing.lets_go && number + 1 == world_.steps.size()) engine_.reset();
  for (const FuturePtr& future : futures) wait_for(future);
  for (const at::Tensor& gradient : gradients) seen.buckets.push_back(bytes_of(gradient));
  if (engine_) {
    learn(number, gradients);
    if (host_.playing.watched || number % 2 == 1) seen.after = engine_->state();
  }
  seen_.steps.emplace(number, std::move(seen));
}

// What happens before a step.
void Rank::prepare(uint64_t number) {
  const Step& step = world_.steps[number];
  if (differs_at(number, Difference::kStep)) {
    EngineState ahead = engine_->state();
    ++ahead.steps;
    engine_->load_state(ahead);
  }
  if (differs_at(number, Difference::kParameters)) parameters_.back().add_(1);
  if (differs_at(number, Difference::kFailure)) {
    engine_->fail(Error(ErrorKind::kState, "planned failure"));
  }
  if (loss_scale_.defined()) loss_scale_.fill_(std::ldexp(1.0, step.loss_scale_exponent));
  if (differs_at(number, Difference::kLossScale)) loss_scale_.mul_(2);
  switch (step.before) {
    case Before::kNothing: return;
    case Before::kScaleResiduals: return engine_->scale_residuals(kAdded);
    case Before::kAddToResidual:
      for (uint32_t i = 0; i < world_.parameters.size(); ++i) {
        const ParameterSpec& spec = world_.parameters[i];
        if (!spec.worker_residual || spec.num_elements == 0) continue;
        engine_->add_to_worker_residual(
            i, at::full({static_cast<int64_t>(spec.num_elements)}, kAdded), 1.0F);
      }
  }
}

std::vector<FuturePtr> Rank::hand_over(uint64_t number, std::vector<at::Tensor>& gradients) {
  const size_t count = world_.buckets.size();
  const bool backwards = differs_at(number, Difference::kOrder);
  bool shorten = differs_at(number, Difference::kShortBucket);
  std::vector<FuturePtr> futures;
  gradients.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const size_t b = backwards ? count - 1 - i : i;
    const std::vector<uint32_t>& bucket = world_.buckets[b];
    at::Tensor& values = gradients[b] = gradient(number, bucket);
    if (world_.passes(number, b)) {
      engine_->pass(bucket);
      continue;
    }
    if (shorten && values.numel() > 0) {
      values = values.narrow(0, 0, values.numel() - 1);
      shorten = false;
    }
    UsedMap used;
    for (const uint32_t index : bucket) {
      if (world_.may_be_unused) used.push_back(world_.steps[number].used[rank_][index]);
    }
    futures.push_back(make_future(c10::NoneType::get(), values));
    engine_->run(bucket, std::move(used), values, futures.back(), c10::IValue());
  }
  return futures;
}

at::Tensor Rank::gradient(uint64_t number, const std::vector<uint32_t>& bucket) const {
  std::vector<at::Tensor> parts;
  for (const uint32_t index : bucket) {
    auto values = gradient_of(world_, number, rank_, index);
    parts.push_back(at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kDouble)
                        .to(torch_dtype(world_.parameters[index].dtype), /*non_blocking=*/false,
                            /*copy=*/true));
  }
  return at::cat(parts);
}

void Rank::wait_for(const FuturePtr& future) {
  struct Done {
    std::mutex mutex;
    Signal changed;
  };
  const auto done = std::make_shared<Done>();
  future->addCallback([done](c10::ivalue::Future&) {
    const std::lock_guard lock(done->mutex);
    done->changed.notify_all();
  });
  {
    std::unique_lock lock(done->mutex);
    done->changed.wait(lock, [&] { return future->completed(); });
  }
  if (future->hasError()) std::rethrow_exception(future->exception_ptr());
}

// So that ranks whose gradients differ get other parameters.
void Rank::learn(uint64_t number, const std::vector<at::Tensor>& gradients) {
  for (size_t b = 0; b < gradients.size(); ++b) {
    const at::Tensor& parameter = parameters_[world_.buckets[b].front()];
    const int64_t count = std::min(parameter.numel(), gradients[b].numel());
    // A reduce-scatter leaves every rank with its own, as does what no rank uses.
    const bool equal = world_.collective == Collective::kAllReduce &&
                       std::ranges::all_of(world_.buckets[b], [&](uint32_t index) {
                         return world_.is_used(number, index);
                       });
    if (!equal || count == 0) continue;
    parameter.narrow(0, 0, count).add_(gradients[b].narrow(0, 0, count).to(at::kFloat));
  }
}

// In shared memory it counts what it writes there.
void Rank::expect_bytes_counted() const {
  if (!engine_ || world_.siblings_share) return;
  const EngineStats stats = engine_->stats();
  const uint64_t counted = stats.wire_bytes + stats.local_bytes;
  const std::optional<uint64_t> sent = host_.sent_bytes(rank_);
  if (!sent || counted == *sent) return;
  throw Broken("rank " + std::to_string(rank_) + " counts " + std::to_string(counted) +
               " bytes, and sends " + std::to_string(*sent));
}

}  // namespace gradferry::sim
