// The options of an engine, on the host or on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "gradferry/error.h"
#include "layout.h"
#include "messages.h"
#include "momentum.h"
#include "nodes.h"
#include "peers.h"
#include "plan.h"

namespace gradferry {

// Turns an Error into an exception that torch's autograd can pass on to Python.
using ExceptionFactory = std::exception_ptr (*)(const Error&);

struct EngineOptions {
  std::vector<ParameterSpec> parameters;  // in the order of named_parameters()
  uint32_t rank;
  uint32_t world_size;
  Nodes nodes;  // of world_size ranks
  uint64_t config_hash;
  uint64_t layout_hash;
  uint64_t seed;
  uint64_t warmup_steps;   // first steps, without momentum, in which warm-up codecs are used
  bool compressed_warmup;  // some warm-up codec is lossy; if not, these steps touch no residual
  double momentum;         // 0: none; if not 0, every parameter has a worker residual
  bool raise_nonfinite;    // a decoded NaN or infinity is an error; else every rank receives it
  bool exact_skip;         // a step with a NaN or infinity leaves the residuals unchanged
  at::Tensor loss_scale;   // one fp32 that a GradScaler writes after every step; undefined: 1
  uint64_t check_every;    // steps between comparisons of all ranks' parameters; 0: none
  uint32_t chunk_bytes;    // most payload bytes per owner and stage in one chunk
  bool equal_scatter;      // as in PlanOptions; equal on all ranks
  Collective collective;   // of every bucket; equal on all ranks
  uint64_t workspace_cap_bytes;  // most memory for messages (workspace.h)
  bool find_unused_parameters;   // DDP's: commits tell which parameters a rank used
  std::string way_on;            // for people: what to do after an error has ended the engine
  ExceptionFactory make_exception;
  std::shared_ptr<Peers> peers;  // never null

  Agreement agreement() const {
    return {rank, world_size, config_hash, layout_hash, loss_scale.defined()};
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
  bool gathers() const { return collective == Collective::kAllReduce; }
  bool needs_every_bucket() const { return momentum != 0 || exact_skip; }
  // How many comparisons of parameters are due when `step` begins, since step 0.
  uint64_t checks_due(uint64_t step) const { return check_every == 0 ? 0 : step / check_every; }
};

}  // namespace gradferry
