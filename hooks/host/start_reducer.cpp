#include "host/start_reducer.h"

#include <c10/util/Exception.h>
#include <fnmatch.h>

#include <algorithm>
#include <iomanip>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "gradferry/codec.h"
#include "gradferry/wire.h"
#include "hash64.h"
#include "host/connect_ranks.h"
#include "host/sockets.h"
#include "host/tensor_memory.h"
#include "protocol/defaults.h"
#include "protocol/nodes.h"
#include "rendezvous.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kMostPatience = std::chrono::minutes(5);
constexpr const char* kRecoveryHint =
    "This Reducer is finished, on all ranks. To go on, make a new one on every rank.";

static_assert(ReducerOptions().bucket_cap_mb == kBucketCapMiB);

// How long ranks wait for each other; some time also with a timeout that is an error.
milliseconds patience(const ReducerOptions& options) {
  return options.timeout.count() > 0 ? std::min(options.timeout / 2, kMostPatience) : kMostPatience;
}

void check_options(const ReducerOptions& options) {
  GRADFERRY_EXPECTS(options.timeout.count() > 0, kConfig,
                    "timeout=" + std::to_string(options.timeout.count()) +
                        " ms must be more than 0, such as std::chrono::minutes(10)");
  GRADFERRY_EXPECTS(options.momentum >= 0 && options.momentum < 1, kConfig,
                    "momentum=" + std::to_string(options.momentum) +
                        " must be from 0 (none) to less than 1, such as 0.9");
  const bool has_worker = options.error_feedback != "none" && options.error_feedback != "owner";
  GRADFERRY_EXPECTS(options.momentum == 0 || has_worker, kConfig,
                    "momentum lives in the worker residual, which error_feedback='" +
                        options.error_feedback + "' leaves out; use auto, both or worker");
  GRADFERRY_EXPECTS(options.bucket_cap_mb > 0 && options.bucket_cap_mb < (1 << 24), kConfig,
                    "bucket_cap_mb=" + std::to_string(options.bucket_cap_mb) +
                        " must be a number of MiB, more than 0, such as 25");
}

void check_tensors(const Reducer::NamedTensors& tensors) {
  GRADFERRY_EXPECTS(!tensors.empty(), kConfig, "there are no tensors to average");
  std::set<std::string> names;
  std::vector<at::Tensor> all;
  for (const auto& [name, tensor] : tensors) {
    GRADFERRY_EXPECTS(names.insert(name).second, kConfig,
                      "two tensors are called '" + name + "'; residuals are kept by name");
    GRADFERRY_EXPECTS(tensor.defined() && tensor.layout() == at::kStrided, kConfig,
                      "'" + name + "' is not a dense tensor");
    GRADFERRY_EXPECTS(tensor.is_cpu(), kConfig,
                      "'" + name + "' is on " + tensor.device().str() +
                          ", but a Reducer of C++ averages tensors on the CPU only");
    try {
      to_scalar_type(tensor.scalar_type());
    } catch (const Error& error) {
      throw Error(error.kind(), "'" + name + "': " + error.what());
    }
    all.push_back(tensor);
  }
  if (const auto problem = memory_shared(all, tensors)) throw Error(ErrorKind::kConfig, *problem);
}

bool matches(const ReducerRule& rule, const std::string& name) {
  return fnmatch(rule.name.c_str(), name.c_str(), FNM_NOESCAPE) == 0;
}

// One that matches nothing was meant for other names.
void check_rules(const ReducerOptions& options, const Reducer::NamedTensors& tensors) {
  constexpr size_t kShown = 8;
  for (const ReducerRule& rule : options.rules) {
    parse_codec(rule.codec);
    const auto matched = [&](const auto& named) { return matches(rule, named.first); };
    if (std::ranges::any_of(tensors, matched)) continue;
    std::string names;
    for (size_t i = 0; i < std::min(tensors.size(), kShown); ++i) {
      names += (i == 0 ? "'" : ", '") + tensors[i].first + "'";
    }
    if (tensors.size() > kShown)
      names += " and " + std::to_string(tensors.size() - kShown) + " more";
    throw Error(ErrorKind::kConfig, "the rule for '" + rule.name +
                                        "' matches no tensor; a pattern covers a whole name, and "
                                        "the names are " +
                                        names);
  }
}

std::string canonical(const std::string& codec) { return parse_codec(codec).canonical; }

std::string codec_of(const std::string& name, const at::Tensor& tensor,
                     const ReducerOptions& options) {
  if (tensor.scalar_type() == at::kDouble) return "exact";
  for (const ReducerRule& rule : options.rules) {
    if (matches(rule, name)) return canonical(rule.codec);
  }
  const bool is_exempt = tensor.dim() <= int64_t{kExemptMaxDims} ||
                         static_cast<uint64_t>(tensor.numel()) <= kExemptMaxSize;
  return is_exempt ? "exact" : canonical(options.codec);
}

std::vector<ParameterSpec> describe(const Reducer::NamedTensors& tensors,
                                    const ReducerOptions& options) {
  std::vector<ParameterSpec> specs;
  for (const auto& [name, tensor] : tensors) {
    const std::string codec = codec_of(name, tensor, options);
    const KeptResiduals kept = kept_residuals(codec, options.error_feedback, options.momentum);
    specs.push_back({.name = name,
                     .num_elements = static_cast<uint64_t>(tensor.numel()),
                     .dtype = to_scalar_type(tensor.scalar_type()),
                     .codec = codec,
                     .warmup = "exact",
                     .worker_residual = kept.worker,
                     .owner_residual = kept.owner});
  }
  return specs;
}

std::string text_of(double number) {
  std::ostringstream text;
  text << std::setprecision(std::numeric_limits<double>::max_digits10) << number;
  return text.str();
}

// A codec was asked for, and none is used.
void warn_if_exact(const ReducerOptions& options, const std::vector<ParameterSpec>& specs) {
  const auto is_lossy = [](const std::string& codec) { return parse_codec(codec).codec->lossy; };
  const auto is_compressed = [&](const ParameterSpec& spec) { return is_lossy(spec.codec); };
  if (!is_lossy(options.codec) || std::ranges::any_of(specs, is_compressed)) return;
  TORCH_WARN("nothing is compressed: every tensor has at most ", kExemptMaxDims,
             " dimension, fewer than ", kExemptMaxSize + 1,
             " elements, or dtype float64, or a rule says so; leave gradferry out, or give tensors "
             "a codec by rules");
}

// The configuration of a rank, which must be equal on all ranks.
struct Proposal {
  Brought::Fields run;      // what a saved state does not depend on
  Brought::Fields options;  // what it depends on
  Brought::Fields layout;   // and this
  std::vector<ParameterSpec> specs;
};

Proposal propose(const Reducer::NamedTensors& tensors, const ReducerOptions& options,
                 uint32_t world_size) {
  check_options(options);
  check_tensors(tensors);
  check_rules(options, tensors);
  Proposal proposal{.run = {{"gradferry version", GRADFERRY_VERSION},
                            {"wire version", std::to_string(kWireVersion)},
                            {"bucket_cap_mb", text_of(options.bucket_cap_mb)}},
                    .options = {{"world size", std::to_string(world_size)},
                                {"codec", canonical(options.codec)},
                                {"error_feedback", options.error_feedback},
                                {"momentum", text_of(options.momentum)},
                                {"warmup_steps", std::to_string(options.warmup_steps)},
                                {"seed", std::to_string(options.seed)},
                                {"number of tensors", std::to_string(tensors.size())}},
                    .layout = {},
                    .specs = describe(tensors, options)};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    proposal.layout.emplace_back(
        "tensor " + std::to_string(i),
        name + " " + shape_and_dtype(tensor) + " " + proposal.specs[i].codec);
  }
  return proposal;
}

std::string text_of(const Brought::Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) text += name + ": " + value + "\n";
  return text;
}

uint64_t hash_of(const std::string& text) { return hash64(text.data(), text.size()); }

// Another rank could not connect, and brings the error to the next rendezvous.
struct OtherRankFailed : std::exception {};

// `has_failed`: whether a rank has said that it cannot.
ExchangeLanes connect(const ReducerOptions& options, c10d::Store& store, uint32_t rank,
                      uint32_t world_size, const std::function<bool()>& has_failed) {
  constexpr size_t kLanes = 3;  // scatter, gather, commit
  std::vector<uint32_t> everyone(world_size);
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto lanes = make_socket_lanes(
      rank,
      connect_ranks(store, {.rank = rank,
                            .world_size = world_size,
                            .world_ranks = {},
                            .lanes = std::vector<std::vector<uint32_t>>(kLanes, everyone),
                            .deadline = now() + patience(options) / 2,
                            .between_polls =
                                [&] {
                                  if (has_failed()) throw OtherRankFailed();
                                }}),
      options.timeout);
  return {.scatter = lanes[0],
          .gather = lanes[1],
          .commit = lanes[2],
          .local_scatter = nullptr,
          .forward = nullptr,
          .hashes = nullptr};
}

// `peers`: a store for errors; null in a world of one, which has no lanes.
std::shared_ptr<HostEngine> start_engine(const Proposal& proposal, const ReducerOptions& options,
                                         ExchangeLanes lanes, c10::intrusive_ptr<c10d::Store> peers,
                                         uint32_t rank, uint32_t world_size) {
  const std::string layout = text_of(proposal.layout);
  EngineOptions engine_options{
      .parameters = proposal.specs,
      .rank = rank,
      .world_size = world_size,
      .nodes = Nodes::flat(world_size),
      .config_hash = hash_of(text_of(proposal.run) + text_of(proposal.options) + layout),
      .layout_hash = hash_of(layout),
      .seed = options.seed,
      .warmup_steps = options.warmup_steps,
      .momentum = options.momentum,
      .chunk_bytes = chunk_bytes_within(kWorkspaceCapBytes, world_size, kChunkBytes),
      .recovery_hint = kRecoveryHint,
      .peers = std::make_shared<Peers>(std::move(peers), rank, world_size)};
  return HostEngine::start(std::move(engine_options), ParameterHashes({}), std::move(lanes),
                           /*memory=*/nullptr, /*local_stage=*/"");
}

std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

std::string shape_and_dtype(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes() << " " << c10::toString(tensor.scalar_type());
  return text.str();
}

StartedReducer start_reducer(const Reducer::NamedTensors& tensors, const ReducerOptions& options,
                             c10::intrusive_ptr<c10d::Store> store, uint32_t rank,
                             uint32_t world_size, const std::function<void()>& allocate) {
  GRADFERRY_EXPECTS(rank < world_size, kConfig,
                    "rank=" + std::to_string(rank) +
                        " must be less than world_size=" + std::to_string(world_size));
  GRADFERRY_EXPECTS(world_size <= kMostRanks, kConfig,
                    "world_size=" + std::to_string(world_size) + " is more than " +
                        std::to_string(kMostRanks) + "; give the number of ranks");
  GRADFERRY_EXPECTS(store || world_size == 1, kConfig, "the store is null");
  std::optional<Rendezvous> rendezvous;
  if (world_size > 1) {
    store = c10::make_intrusive<c10d::PrefixStore>("gradferry/reducers", store);
    rendezvous.emplace(store, rank, world_size, patience(options));
  }
  Proposal proposal;
  Brought brought;
  std::string layout = "rank: " + std::to_string(rank) + "\n";
  try {  // what is wrong here must be said on all ranks
    proposal = propose(tensors, options, world_size);
    for (const auto* fields : {&proposal.run, &proposal.options, &proposal.layout}) {
      brought.fields.insert(brought.fields.end(), fields->begin(), fields->end());
    }
    layout += text_of(proposal.options) + text_of(proposal.layout);
  } catch (const Error& error) {
    if (!rendezvous) throw;
    brought.error = error;
  } catch (const std::exception& error) {
    if (!rendezvous) throw;
    brought.error.emplace(ErrorKind::kPeer, "cannot begin: " + first_line(error));
  }
  StartedReducer started{.engine = nullptr, .layout = std::move(layout)};
  if (!rendezvous) {
    allocate();
    started.engine = start_engine(proposal, options, {}, nullptr, rank, world_size);
    return started;
  }
  const uint64_t number = rendezvous->meet({"make a Reducer", &brought, {}});
  Brought outcome;
  const auto own = c10::make_intrusive<c10d::PrefixStore>(std::to_string(number), store);
  try {
    ExchangeLanes lanes = connect(options, *own, rank, world_size,
                                  [&] { return rendezvous->has_failed(number + 1); });
    allocate();
    started.engine =
        start_engine(proposal, options, std::move(lanes),
                     c10::make_intrusive<c10d::PrefixStore>("peers", own), rank, world_size);
  } catch (const OtherRankFailed&) {
    started.engine = nullptr;
  } catch (const Error& error) {
    outcome.error = error;
    outcome.is_echo = dynamic_cast<const EchoError*>(&error) != nullptr;
  } catch (const std::exception& error) {
    outcome.error.emplace(ErrorKind::kPeer, "cannot make a Reducer: " + first_line(error));
  }
  rendezvous->meet({"connect", &outcome, {}});
  GRADFERRY_EXPECTS(started.engine, kPeer, "another rank could not connect; look at its error");
  if (rank == 0) warn_if_exact(options, proposal.specs);
  return started;
}

}  // namespace gradferry
