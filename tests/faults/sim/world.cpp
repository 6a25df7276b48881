#include "tests/faults/sim/world.h"

#include <algorithm>
#include <array>

namespace gradferry::sim {
namespace {

constexpr uint64_t kConfigHash = 0xc0ffee, kLayoutHash = 0x1a407;

// `exact` first, the others by what they do to numbers.
constexpr std::array kCodecs = {"exact",           "q8",         "q4",   "sign1",
                                "topk:ratio=0.05", "rht:bits=3", "bf16", "topk:ratio=0.2,values=q4",
                                "rht:bits=2",      "rht:bits=4"};
constexpr std::array<uint32_t, 14> kSizes = {3,   1,    17,   64,   129,  500,  1000,
                                             257, 4095, 4096, 4097, 8192, 9000, 0};
constexpr std::array kDtypes = {ScalarType::kFloat32, ScalarType::kBFloat16, ScalarType::kFloat16,
                                ScalarType::kFloat64};
constexpr std::array<uint32_t, 3> kChunkBytes = {1U << 16, 4096, 256};
constexpr uint32_t kMostSteps = 6;

std::vector<std::vector<uint32_t>> draw_nodes(Choices& choices, uint32_t size) {
  std::vector<std::vector<uint32_t>> nodes;
  const bool several = size > 2 && choices.below(3) == 2;
  const uint32_t number = several ? 2 + choices.below(size - 2) : size;
  for (uint32_t rank = 0; rank < size; ++rank) {
    if (rank < number) {
      nodes.push_back({rank});
    } else {
      nodes[choices.below(number)].push_back(rank);
    }
  }
  return nodes;
}

ParameterSpec draw_parameter(Choices& choices, const World& world, uint32_t index) {
  ParameterSpec parameter{};
  parameter.name = "weight" + std::to_string(index);
  parameter.num_elements = choices.pick(kSizes);
  parameter.dtype = choices.below(3) == 0 ? ScalarType::kFloat32 : choices.pick(kDtypes);
  const bool is_double = parameter.dtype == ScalarType::kFloat64;
  parameter.codec = is_double ? "exact" : choices.pick(kCodecs);
  parameter.warmup = is_double || !world.compressed_warmup ? "exact" : choices.pick(kCodecs);
  const bool gathers = world.collective == Collective::kAllReduce;
  const bool lossy = parameter.codec != "exact" || parameter.warmup != "exact";
  parameter.worker_residual = (lossy && choices.below(3) != 2) || world.momentum != 0;
  parameter.owner_residual = lossy && gathers && choices.below(3) != 2;
  if (!gathers) parameter.owner = choices.below(world.size);
  if (world.size == 1) place_alone(parameter);
  return parameter;
}

// Buckets of one dtype each, in any order.
std::vector<std::vector<uint32_t>> draw_buckets(Choices& choices, const World& world) {
  std::vector<std::vector<uint32_t>> buckets;
  for (uint32_t i = 0; i < world.parameters.size(); ++i) {
    const bool fits = !buckets.empty() &&
                      world.parameters[buckets.back().front()].dtype == world.parameters[i].dtype;
    if (fits && choices.below(2) == 0) {
      buckets.back().push_back(i);
    } else {
      const uint32_t from_end = choices.below(static_cast<uint32_t>(buckets.size()) + 1);
      buckets.insert(buckets.end() - from_end, {i});
    }
  }
  return buckets;
}

Step draw_step(Choices& choices, const World& world) {
  Step step;
  if (world.has_loss_scale) step.loss_scale_exponent = static_cast<int>(choices.below(5)) - 2;
  constexpr std::array kBefore = {Before::kNothing,        Before::kNothing,
                                  Before::kNothing,        Before::kNothing,
                                  Before::kScaleResiduals, Before::kAddToResidual};
  step.before = choices.pick(kBefore);
  constexpr std::array kNumbers = {
      Numbers::kWhole, Numbers::kUniform, Numbers::kUniform, Numbers::kWide, Numbers::kZeros,
      Numbers::kTiny,  Numbers::kUniform, Numbers::kHuge,    Numbers::kNaN,  Numbers::kInfinity};
  // Where a NaN is an error it ends the world: then mostly without.
  const bool calm = world.raise_nonfinite && choices.below(8) != 7;
  for (size_t i = 0; i < world.parameters.size(); ++i) {
    Numbers numbers = choices.pick(kNumbers);
    if (calm && numbers >= Numbers::kHuge) numbers = Numbers::kUniform;
    step.numbers.push_back(numbers);
  }
  step.used.assign(world.size, std::vector<uint8_t>(world.parameters.size(), 1));
  if (world.may_be_unused) {
    for (size_t i = 0; i < world.parameters.size(); ++i) {
      const bool by_none = choices.below(5) == 4;
      for (auto& used : step.used) used[i] = !by_none && choices.below(3) != 2;
    }
  }
  return step;
}

bool is_coded(std::string_view codec) { return codec != "exact" && codec != "bf16"; }

void draw_what_goes_wrong(Choices& choices, World& world) {
  world.resumes = choices.below(2) == 1;
  if (world.resumes && choices.below(3) == 2) world.resized = 1 + choices.below(5);
  if (world.size == 1) return;
  constexpr std::array kMishaps = {
      Mishap::kFlip,  Mishap::kTruncate, Mishap::kLose, Mishap::kReplay, Mishap::kSwap,
      Mishap::kDelay, Mishap::kStall,    Mishap::kCut,  Mishap::kKill,   Mishap::kHalt};
  constexpr std::array kDifferences = {
      Difference::kConfig,     Difference::kLayout,      Difference::kStep,   Difference::kOrder,
      Difference::kParameters, Difference::kShortBucket, Difference::kFailure};
  const uint32_t kind = choices.below(4);
  if (kind < 2) return;
  if (kind == 2) {
    world.fault = {choices.pick(kMishaps), choices.below(65536), choices.below(1U << 20)};
    // Of `exact` and `bf16` all bytes are numbers.
    const bool all_lossy = std::ranges::all_of(world.parameters, [&](const ParameterSpec& p) {
      return is_coded(p.codec) && (world.warmup_steps == 0 || is_coded(p.warmup));
    });
    if (all_lossy && choices.below(2) == 1) world.fault.mishap = Mishap::kForge;
    return;
  }
  world.difference = choices.pick(kDifferences);
  world.different_rank = choices.below(world.size);
  world.different_step = choices.below(static_cast<uint32_t>(world.steps.size()));
}

// Drawn last: worlds without are what they would be if there were none.
void draw_passes(Choices& choices, World& world) {
  // Momentum mode needs every bucket.
  if (world.momentum != 0 || !choices.one_in(4)) return;
  for (Step& step : world.steps) {
    for (size_t i = 0; i < world.buckets.size(); ++i) step.passes.push_back(choices.one_in(3));
  }
}

// Likewise.
void draw_loss_scale(Choices& choices, World& world) {
  if (world.goes_wrong() || world.size == 1 || !world.has_loss_scale || !choices.one_in(3)) return;
  world.difference = Difference::kLossScale;
  world.different_rank = choices.below(world.size);
  world.different_step = choices.below(static_cast<uint32_t>(world.steps.size()));
}

const char* name_of(Numbers numbers) {
  constexpr std::array kNames = {"whole", "zeros", "uniform", "wide",
                                 "tiny",  "huge",  "NaN",     "infinity"};
  return kNames[static_cast<size_t>(numbers)];
}

const char* name_of(Before before) {
  constexpr std::array kNames = {"", " scaled", " added"};
  return kNames[static_cast<size_t>(before)];
}

const char* name_of(Mishap mishap) {
  constexpr std::array kNames = {"none",  "flip",  "truncate", "lose", "replay", "swap",
                                 "delay", "stall", "cut",      "kill", "halt",   "forge"};
  return kNames[static_cast<size_t>(mishap)];
}

const char* name_of(Difference difference) {
  constexpr std::array kNames = {"none",       "config hash",  "layout hash", "step",      "order",
                                 "parameters", "short bucket", "failure",     "loss scale"};
  return kNames[static_cast<size_t>(difference)];
}

const char* name_of(ScalarType dtype) {
  constexpr std::array kNames = {"fp32", "bf16", "fp16", "fp64"};
  return kNames[static_cast<size_t>(dtype)];
}

template <typename T>
std::string list(const std::vector<T>& numbers) {
  std::string text;
  for (const T& number : numbers) {
    if (!text.empty()) text += ',';
    text += std::to_string(number);
  }
  return '(' + text + ')';
}

}  // namespace

World World::draw(Choices& choices) {
  constexpr std::array<uint32_t, 10> kWorldSizes = {2, 2, 2, 3, 3, 3, 4, 4, 5, 1};
  World world;
  world.size = choices.pick(kWorldSizes);
  if (world.size == 5 && choices.one_in(5)) world.size = 11;  // some without tiles need not send
  world.nodes = draw_nodes(choices, world.size);
  const bool flat = world.nodes.size() == world.size;
  world.siblings_share = !flat && choices.below(2) == 1;
  if (flat && world.size > 1 && choices.below(6) == 5) {
    world.collective = Collective::kReduceScatter;
  }
  const bool gathers = world.collective == Collective::kAllReduce;
  world.warmup_steps = choices.below(3) == 2 ? 1 + choices.below(2) : 0;
  world.compressed_warmup = world.warmup_steps != 0 && choices.below(2) == 1;
  world.momentum = gathers && choices.below(3) == 2 ? 0.9 : 0.0;
  world.raise_nonfinite = choices.below(4) == 3;
  world.has_loss_scale = choices.below(3) == 2;
  // Momentum mode needs the gradients of all parameters.
  world.may_be_unused = gathers && world.momentum == 0 && choices.below(4) == 3;
  world.check_every = choices.below(3) == 2 ? 1 + choices.below(2) : 0;
  world.chunk_bytes = choices.pick(kChunkBytes);
  world.equal_scatter = choices.below(2) == 1;
  const uint32_t num_parameters = 1 + choices.below(5);
  for (uint32_t i = 0; i < num_parameters; ++i) {
    world.parameters.push_back(draw_parameter(choices, world, i));
  }
  world.compressed_warmup =
      world.compressed_warmup && std::ranges::any_of(world.parameters, [](const auto& parameter) {
        return parameter.warmup != "exact";
      });
  world.buckets = draw_buckets(choices, world);
  const uint32_t num_steps = 1 + choices.below(kMostSteps);
  for (uint32_t i = 0; i < num_steps; ++i) world.steps.push_back(draw_step(choices, world));
  world.data_seed = choices.below(1U << 30);
  world.order_seed = choices.below(1U << 30);
  draw_what_goes_wrong(choices, world);
  draw_passes(choices, world);
  draw_loss_scale(choices, world);
  world.little_memory = choices.one_in(3) && world.size <= 5;
  return world;
}

EngineOptions World::options(uint32_t rank, bool goes_wrong) const {
  const uint64_t workspace_cap = uint64_t{1} << (little_memory ? 20 : 30);
  EngineOptions options{.parameters = parameters,
                        .rank = rank,
                        .world_size = size,
                        .nodes = Nodes(nodes),
                        .config_hash = kConfigHash,
                        .layout_hash = kLayoutHash,
                        .seed = 11,
                        .warmup_steps = warmup_steps,
                        .compressed_warmup = compressed_warmup,
                        .momentum = momentum,
                        .raise_nonfinite = raise_nonfinite,
                        .check_every = check_every,
                        .chunk_bytes = chunk_bytes,
                        .on_streams = equal_scatter,
                        .collective = collective,
                        .workspace_cap_bytes = workspace_cap,
                        .find_unused_parameters = may_be_unused};
  if (!goes_wrong || rank != different_rank) return options;
  if (difference == Difference::kConfig) ++options.config_hash;
  if (difference == Difference::kLayout) ++options.layout_hash;
  return options;
}

bool World::is_used(uint64_t step, uint32_t parameter) const {
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (passes(step, b) && std::ranges::count(buckets[b], parameter) != 0) return false;
  }
  return std::ranges::any_of(steps[step].used, [&](const auto& by) { return by[parameter] != 0; });
}

std::string World::text() const {
  std::string text = std::to_string(size) + " ranks";
  if (nodes.size() != size) {
    text += ", nodes";
    for (const auto& members : nodes) text.append(" ").append(list(members));
    if (siblings_share) text += " that share memory";
  }
  if (collective == Collective::kReduceScatter) text += ", reduce-scatter";
  if (momentum != 0) text += ", momentum " + std::to_string(momentum);
  if (warmup_steps != 0) text += ", " + std::to_string(warmup_steps) + " warm-up steps";
  if (raise_nonfinite) text += ", NaN is an error";
  if (has_loss_scale) text += ", loss scale";
  if (may_be_unused) text += ", find_unused";
  if (check_every != 0) text += ", check_every " + std::to_string(check_every);
  text += ", chunks of " + std::to_string(chunk_bytes) + (equal_scatter ? ", padded" : "") +
          (little_memory ? ", little memory" : "") + ", order " + std::to_string(order_seed);
  for (const auto& p : parameters) {
    text += "\n  " + p.name + ": " + std::to_string(p.num_elements) + " " + name_of(p.dtype) + " " +
            p.codec + (warmup_steps != 0 ? " after " + p.warmup : "") +
            (p.worker_residual ? " worker" : "") + (p.owner_residual ? " owner" : "") +
            (p.owner ? " of rank " + std::to_string(*p.owner) : "");
  }
  text += "\n  buckets";
  for (const auto& bucket : buckets) text.append(" ").append(list(bucket));
  for (size_t i = 0; i < steps.size(); ++i) {
    text += "\n  step " + std::to_string(i) + ":" + name_of(steps[i].before);
    for (const Numbers numbers : steps[i].numbers) text += std::string(" ") + name_of(numbers);
    if (has_loss_scale) text += ", scale 2^" + std::to_string(steps[i].loss_scale_exponent);
    const auto add = [&](const std::vector<uint8_t>& flags) {
      text += ' ';
      for (const uint8_t flag : flags) text += flag != 0 ? "1" : "0";
    };
    if (may_be_unused) {
      text += ", used";
      std::ranges::for_each(steps[i].used, add);
    }
    if (has_passes()) {
      text += ", passes";
      add(steps[i].passes);
    }
  }
  if (fault.mishap != Mishap::kNone) {
    text += std::string("\n  mishap: ") + name_of(fault.mishap) + " of message " +
            std::to_string(fault.message) + "/65536, detail " + std::to_string(fault.detail);
  }
  if (difference != Difference::kNone) {
    text += "\n  rank " + std::to_string(different_rank) + " differs: " + name_of(difference) +
            " from step " + std::to_string(different_step);
  }
  if (resumes) text += "\n  resumes" + (resized ? " with " + std::to_string(resized) : "");
  return text;
}

}  // namespace gradferry::sim
