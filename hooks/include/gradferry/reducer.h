// Averages the gradients of a LibTorch program over ranks, compressed. Needs no Python.
//
//   gradferry::Reducer reducer(model->named_parameters().pairs(), {.codec = "q4"}, store, rank,
//                              world_size);
//   reducer.average_in_backward();
//   ...
//   loss.backward();    // encodes gradients and sends them as soon as they are there
//   reducer.wait();     // every .grad is the average over all ranks, with the same bits on each
//   optimizer.step();
//
// docs/guide/reducer.md explains how to build against this header.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "gradferry/error.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace gradferry {

// The codec of tensors by name. `name`: a shell pattern for the whole name, such as "*embedding*".
struct ReducerRule {
  std::string name;
  std::string codec;
};

// All of them, except the timeout, must be equal on all ranks.
struct ReducerOptions {
  // What tensors travel with, such as "q4" or "topk:ratio=0.01". Those with at most one dimension
  // or fewer than 1024 elements, and those of float64, are sent as they are ("exact").
  std::string codec = "q4";
  // The first rule that matches a tensor's name counts, whatever the size of the tensor; not for
  // float64. Each must match a tensor.
  std::vector<ReducerRule> rules = {};
  // Which residuals, which carry the compression error into the next step, are kept: "none",
  // "owner", "worker", "both", or "auto": both below 8 bits per element, else the owner's.
  std::string error_feedback = "auto";
  // From 0 to less than 1. Not 0: tensors receive the momentum of gradients instead of gradients,
  // for an optimizer without momentum of its own.
  double momentum = 0;
  // First steps, sent as they are and without momentum.
  uint64_t warmup_steps = 0;
  // The seed of the codecs' random numbers.
  uint64_t seed = 0;
  // Tensors travel together in buckets of at most this size, into which they are copied; a larger
  // one travels alone. Averages do not depend on it. MiB.
  double bucket_cap_mb = 25;
  // How long an exchange may be without any progress. Ranks wait half of it, and at most five
  // minutes, for each other when they make a Reducer.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

// Counters of this rank since the Reducer was made.
struct ReducerStats {
  uint64_t steps = 0;
  uint64_t gradient_bytes = 0;   // of tensors that were averaged
  uint64_t wire_bytes = 0;       // that this rank sent to others
  uint64_t residual_bytes = 0;   // memory of residuals, now
  uint64_t workspace_bytes = 0;  // memory of messages, now
};

// Every rank is a node of its own: ranks that share a machine exchange as all others do. Call it
// from one thread at a time. Its errors are gradferry::Error.
class Reducer {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  // Collective: ranks compare options and tensors, and connect. `tensors`: parameters of a model,
  // or whatever is averaged, on the CPU; their names, shapes and dtypes (float32, bfloat16,
  // float16, float64) count, and are equal on all ranks. `store`: reaches all ranks, such as a
  // c10d::TCPStore, and is new to this run: keys of one that was killed would be taken for those of
  // another process. It must live as long as the Reducer, in whichever process serves it. Ranks
  // make their Reducers in one order. Connections are made between the addresses of the hosts'
  // names, or on the interface that the environment variable GLOO_SOCKET_IFNAME names.
  //
  // Throws, with the same text on all ranks: Error(kConfig) for what cannot be used,
  // Error(kRankMismatch) where ranks differ, Error(kPeer) where a rank does not come or cannot
  // connect. Nothing was changed then. A rank that is not less than world_size, a world_size above
  // 65535, and a store that is null, are errors of that rank alone.
  Reducer(const NamedTensors& tensors, const ReducerOptions& options,
          c10::intrusive_ptr<c10d::Store> store, uint32_t rank, uint32_t world_size);
  ~Reducer();
  // Every call of a Reducer that was moved from throws Error(kState).
  Reducer(Reducer&&) noexcept;
  Reducer& operator=(Reducer&&) noexcept;

  // Replaces tensors by their averages over all ranks; blocks. Collective. `tensors`: in the order
  // of registration, each with the shape and dtype registered, not requiring grad, in memory of its
  // own. Every call is a step, whose compression error the next one adds.
  //
  // Throws Error(kState) for other tensors, Error(kPeer) and Error(kProtocol) where another rank
  // failed or sends what it must not. Any error ends the Reducer on all ranks; every later call
  // throws it. The contents of the tensors are then unspecified.
  void all_reduce(const std::vector<at::Tensor>& tensors);

  // From now on, every backward pass averages the gradients of the registered tensors, which must
  // be leaves that require grad: a bucket is encoded and sent as soon as it is full, in one order
  // on all ranks, while the pass goes on. One pass per step, each followed by wait(); for several,
  // leave this out and pass the gradients to all_reduce(). Not collective.
  //
  // Throws Error(kConfig), on this rank alone, where a tensor is no such leaf or has a
  // post-accumulate-grad hook already. Nothing was changed then.
  void average_in_backward();
  // Returns when .grad of all registered tensors is the average; where this pass gave a tensor no
  // gradient, of what its .grad holds, or zeros. backward() and wait() throw as all_reduce();
  // Error(kState) also for a wait() without a pass before it, and for gradients that were replaced
  // or changed between them: clip after wait(). A change that torch does not count, as through
  // .data() or a pointer, is seen where it changes one of 64 elements of a gradient.
  void wait();

  ReducerStats stats() const;

  // What this rank must save, after a step, to continue with the same bits: its residuals and the
  // number of steps. Save it like an optimizer: torch::save(reducer, path), torch::load(reducer,
  // path), with a file per rank. Both throw Error(kState), and change nothing, between a pass and
  // its wait(); load() also for the state of another rank, world size, or other options or tensors.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  class Impl;
  Impl& impl() const;  // throws Error(kState) when this was moved from
  std::unique_ptr<Impl> impl_;
};

// For torch::save() and torch::load().
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const Reducer& reducer) {
  reducer.save(archive);
  return archive;
}
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  Reducer& reducer) {
  reducer.load(archive);
  return archive;
}

}  // namespace gradferry
