// What an engine is told when it starts, on the host as on a device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "gradferry/error.h"
#include "layout.h"
#include "messages.h"
#include "momentum.h"
#include "peers.h"

namespace gradferry {

// Turns an Error into an exception that torch's autograd can show to Python.
using ExceptionFactory = std::exception_ptr (*)(const Error&);

// Most payload bytes of a chunk must let a full tile of the widest dtype through.
inline constexpr uint32_t kLeastChunkBytes = kTileElements * sizeof(double);

struct EngineOptions {
  std::vector<ParameterSpec> parameters;  // in the order of named_parameters()
  uint32_t rank;
  uint32_t world_size;
  uint64_t config_hash;
  uint64_t layout_hash;
  uint64_t seed;
  uint64_t warmup_steps;   // first steps, without momentum, in which warm-up codecs are used
  bool compressed_warmup;  // these withhold; else all are `exact`, and no residual is touched
  double momentum;         // 0: none; then every parameter has a worker residual
  bool raise_nonfinite;    // a decoded NaN or infinity is an error instead of being handed on
  bool exact_skip;         // a step with a NaN or infinity leaves the residuals as it found them
  at::Tensor loss_scale;   // one fp32 that a GradScaler writes after every step; undefined: 1
  uint64_t check_every;    // steps between comparisons of all ranks' parameters; 0: none
  uint32_t chunk_bytes;    // most payload bytes per owner and stage in one chunk
  bool find_unused_parameters;  // DDP's: commits tell which parameters a rank used
  ExceptionFactory make_exception;
  std::shared_ptr<Peers> peers;  // never null

  Agreement agreement() const { return {rank, world_size, config_hash, layout_hash}; }
  bool in_warmup(uint64_t step) const { return step < warmup_steps; }
  bool has_momentum(uint64_t step) const { return momentum != 0 && !in_warmup(step); }
  bool touches_residuals(uint64_t step) const { return compressed_warmup || !in_warmup(step); }
  // Whether the residuals that a warm-up leaves behind still have to become those of momentum mode.
  bool turns_to_momentum() const { return compressed_warmup && momentum != 0; }
  // The gradient's share of what a step encodes, and the decoded share that stays in the residual.
  float alpha(const ResolvedCodec& codec, uint64_t step) const {
    return in_warmup(step) ? 1.0F : static_cast<float>(1.0 - momentum_behind(codec, momentum));
  }
  float beta(const ResolvedCodec& codec, uint64_t step) const {
    return in_warmup(step) ? 0.0F : static_cast<float>(momentum_behind(codec, momentum));
  }
  bool needs_every_bucket() const { return momentum != 0 || exact_skip; }
  bool check_is_due(uint64_t step) const {
    return check_every != 0 && step != 0 && step % check_every == 0;
  }
};

}  // namespace gradferry
