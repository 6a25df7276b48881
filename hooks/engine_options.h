// The options of an engine, on the host or on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "gradferry/error.h"
#include "peers.h"
#include "protocol/defaults.h"
#include "protocol/layout.h"
#include "protocol/messages.h"
#include "protocol/nodes.h"
#include "protocol/plan.h"
#include "protocol/workspace.h"
#include "threads.h"

namespace gradferry {

// Momentum mode with codecs that send only a share of the elements.
//
// A step delivers the share 1 - m of a gradient and keeps m for later steps, which delays it by
// m / (1 - m) steps on average. Elements that are not sent wait as well, longer when the share is
// smaller. Both delays together slowed trainings down, so m is smaller for codecs that send fewer
// elements. Every gradient is delivered completely in the end, whatever m is, so learning rates
// need no change. docs/design/decisions.md has the measurements behind the 1/4.
//
// The m of a codec in a training with `momentum` (0: none), in double precision:
// m / (1 - m) = momentum / (1 - momentum) / (1 + (1 / share - 1) / 4) for the codec's sent_share,
// so m = momentum where every element is sent.
inline double momentum_behind(const ResolvedCodec& codec, double momentum) {
  if (codec.codec->sent_share == nullptr) return momentum;
  const double unsent = 1.0 / codec.codec->sent_share(codec.options) - 1.0;
  const double delay = momentum / (1.0 - momentum) / (1.0 + unsent / 4.0);
  return delay / (1.0 + delay);
}

// Turns an Error into an exception that torch's autograd can pass on to Python.
using ExceptionFactory = std::exception_ptr (*)(const Error&);

// What is not given is that of a plain hook in a world of one.
struct EngineOptions {
  std::vector<ParameterSpec> parameters;  // in the order of named_parameters()
  uint32_t rank = 0;
  uint32_t world_size = 1;
  Nodes nodes = Nodes::flat(1);  // of world_size ranks
  uint64_t config_hash = 0;
  uint64_t layout_hash = 0;
  uint64_t seed = 0;
  uint64_t warmup_steps = 0;  // first steps, without momentum, in which warm-up codecs are used
  bool compressed_warmup = false;  // some warm-up codec is lossy; if not, they touch no residual
  double momentum = 0;             // if not 0, every parameter has a worker residual
  bool raise_nonfinite = false;    // a decoded NaN or infinity is an error; else all receive it
  at::Tensor loss_scale{};   // one fp32 that a GradScaler writes after every step; undefined: 1
  uint64_t check_every = 0;  // steps between comparisons of all ranks' parameters; 0: none
  uint32_t chunk_bytes = kChunkBytes;  // as in PlanOptions
  uint32_t most_slots = kHostSlots;  // chunks in flight on a host, if their memory may be so large
  bool on_streams = false;           // as collectives are: few chunks, whose messages have one size
  Collective collective = Collective::kAllReduce;  // of every bucket; equal on all ranks
  bool keep_gathered = false;  // of an all-gather: messages stay, for decode_kept()
  uint64_t workspace_cap_bytes = kWorkspaceCapBytes;  // most memory for messages (workspace.h)
  bool find_unused_parameters = false;  // DDP's: commits tell which parameters a rank used
  std::string recovery_hint{};  // for people: what to do after an error has ended the engine
  ExceptionFactory make_exception = [](const Error& error) {
    return std::make_exception_ptr(error);
  };
  std::shared_ptr<Peers> peers = nullptr;  // never null in an engine

  Agreement agreement() const {
    return {rank, world_size, config_hash, layout_hash, loss_scale.defined()};
  }
  // An error as Python or C++ sees it, as soon as there is memory for it.
  std::exception_ptr exception_of(const Error& error) const {
    return with_memory([&] { return make_exception(error); });
  }
  // This rank, as errors name it.
  uint32_t world_rank() const { return peers->in_world(rank); }
  bool in_warmup(uint64_t step) const { return step < warmup_steps; }
  bool has_momentum(uint64_t step) const { return momentum != 0 && !in_warmup(step); }
  bool touches_residuals(uint64_t step) const { return compressed_warmup || !in_warmup(step); }
  // Whether residuals hold gradients in warm-up steps, and momentum after them.
  bool turns_to_momentum() const { return compressed_warmup && momentum != 0; }
  // Factors of momentum mode: alpha of the gradient before encode, beta of the decoded value that
  // is added to the worker residual.
  float alpha(const ResolvedCodec& codec, uint64_t step) const {
    return in_warmup(step) ? 1.0F : static_cast<float>(1.0 - momentum_behind(codec, momentum));
  }
  float beta(const ResolvedCodec& codec, uint64_t step) const {
    return in_warmup(step) ? 0.0F : static_cast<float>(momentum_behind(codec, momentum));
  }
  bool needs_every_bucket() const { return momentum != 0; }
  // How buckets are cut.
  PlanOptions planning(CodecChoice codecs, bool residuals) const {
    return {.rank = rank,
            .chunk_bytes = chunk_bytes,
            .equal_scatter = on_streams,
            .codecs = codecs,
            .residuals = residuals,
            .dense_bytes = dense_bytes_within(workspace_cap_bytes, chunk_bytes, nodes, on_streams),
            .rail_bytes = rail_bytes_within(workspace_cap_bytes, nodes),
            .collective = collective};
  }
  // How many comparisons of parameters are due when `step` begins, since step 0.
  uint64_t checks_due(uint64_t step) const { return check_every == 0 ? 0 : step / check_every; }
};

}  // namespace gradferry
