#include "tests/faults/sim/check.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "hooks/engine_options.h"

namespace gradferry::sim {
namespace {

// Elements of a parameter, fp64; those that a rank has no residual of are 0.
using Elements = std::vector<double>;

std::string where(uint64_t step, uint32_t rank) {
  return "step " + std::to_string(step) + ", rank " + std::to_string(rank);
}

// A world of one that withholds nothing has residuals without elements, which stand for zeros.
bool same(const at::Tensor& x, const at::Tensor& y) {
  if (x.numel() != y.numel()) return !at::any(x).item<bool>() && !at::any(y).item<bool>();
  return x.nbytes() == y.nbytes() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

bool same(const SavedResiduals& x, const SavedResiduals& y) {
  return same(x.worker, y.worker) && same(x.owner, y.owner);
}

// Where the residuals of a world lie.
class Layouts {
 public:
  explicit Layouts(const World& world) {
    for (uint32_t rank = 0; rank < world.size; ++rank) {
      layouts_.emplace_back(world.parameters, rank, Nodes(world.nodes));
    }
  }
  const Layout& of(uint32_t rank) const { return layouts_[rank]; }

  Elements worker(uint32_t rank, uint32_t parameter, const SavedResiduals& saved) const {
    const Layout& layout = of(rank);
    return elements(rank, parameter, saved.worker,
                    [&](uint64_t tile) { return layout.worker_residual_offset(tile); });
  }
  Elements owner(uint32_t rank, uint32_t parameter, const SavedResiduals& saved) const {
    const Layout& layout = of(rank);
    return elements(rank, parameter, saved.owner,
                    [&](uint64_t tile) { return layout.owner_residual_offset(tile); });
  }

 private:
  template <typename Offset>
  Elements elements(uint32_t rank, uint32_t index, const at::Tensor& residual,
                    const Offset& offset_of) const {
    const Layout& layout = of(rank);
    const Parameter& parameter = layout.parameters()[index];
    Elements values(parameter.num_elements, 0.0);
    if (residual.numel() == 0) return values;
    const auto* from = residual.const_data_ptr<float>();
    for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
      const uint64_t offset = offset_of(parameter.first_tile + t);
      if (offset == kNoResidual) continue;
      std::copy_n(from + offset, layout.tile_elements(parameter, t),
                  values.begin() + int64_t{t} * kTileElements);
    }
    return values;
  }

  std::vector<Layout> layouts_;
};

// The averaged gradients of a parameter.
Elements result_of(const World& world, const StepSeen& seen, uint32_t index) {
  for (size_t b = 0; b < world.buckets.size(); ++b) {
    uint64_t offset = 0;
    for (const uint32_t other : world.buckets[b]) {
      const auto count = static_cast<int64_t>(world.parameters[other].num_elements);
      if (other == index) {
        const auto dtype = torch_dtype(world.parameters[index].dtype);
        const Bytes& bytes = seen.buckets[b];
        at::Tensor values =
            at::from_blob(const_cast<std::byte*>(bytes.data()),
                          {static_cast<int64_t>(bytes.size() / at::elementSize(dtype))}, dtype)
                .narrow(0, static_cast<int64_t>(offset), count)
                .to(at::kDouble);
        const auto* data = values.const_data_ptr<double>();
        return {data, data + count};
      }
      offset += static_cast<uint64_t>(count);
    }
  }
  throw std::logic_error("a parameter without a bucket");
}

// Half a unit in the last place of numbers of size 1, and the smallest number.
double unit_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kBFloat16: return std::ldexp(1.0, -8);
    case ScalarType::kFloat16: return std::ldexp(1.0, -11);
    default: return std::ldexp(1.0, -24);
  }
}
double smallest_of(ScalarType dtype) {
  return dtype == ScalarType::kFloat16    ? std::ldexp(1.0, -24)
         : dtype == ScalarType::kBFloat16 ? std::ldexp(1.0, -133)
                                          : std::ldexp(1.0, -149);
}

// One watched step, on all ranks.
class Balance {
 public:
  Balance(const World& world, const Seen& seen, const Layouts& layouts, uint64_t step)
      : world_(world), seen_(seen), layouts_(layouts), step_(step) {}

  void check() const {
    for (uint32_t rank = 0; rank < world_.size; ++rank) expect_finite(rank);
    for (uint32_t i = 0; i < world_.parameters.size(); ++i) check(i);
  }

 private:
  const StepSeen& of(uint32_t rank) const { return seen_.ranks[rank].steps.at(step_); }
  const SavedResiduals& before(uint32_t rank) const { return of(rank).before->residuals; }
  const SavedResiduals& after(uint32_t rank) const { return of(rank).after->residuals; }

  void expect(bool holds, const std::string& what, uint32_t rank) const {
    if (!holds) throw Broken(where(step_, rank) + ": " + what);
  }

  void expect_finite(uint32_t rank) const {
    const auto finite = [](const at::Tensor& residual) {
      return at::isfinite(residual).all().item<bool>();
    };
    expect(finite(after(rank).worker) && finite(after(rank).owner), "a residual is not finite",
           rank);
  }

  bool in_warmup() const { return step_ < world_.warmup_steps; }
  // A single rank withholds nothing; without momentum it delivers what residuals it was given.
  bool touches_residuals() const {
    if (world_.size == 1 && world_.momentum == 0 && before(0).worker.numel() == 0) return false;
    return world_.compressed_warmup || !in_warmup();
  }

  // The end of a compressed warm-up has scaled what is left, once, in the state after this step.
  bool turns_to_momentum() const {
    return world_.momentum != 0 && world_.compressed_warmup && step_ + 1 == world_.warmup_steps;
  }

  float gain(uint32_t rank) const {
    if (!touches_residuals()) return 1.0F;
    const float units = before(rank).loss_scale;
    const float scale =
        world_.has_loss_scale
            ? static_cast<float>(std::ldexp(1.0, world_.steps[step_].loss_scale_exponent))
            : 1.0F;
    return units == 0.0F ? 1.0F : scale / units;
  }

  // The share of a gradient that momentum mode encodes once its warm-up has ended.
  float alpha_after_warmup(uint32_t index) const {
    const ParsedCodec codec =
        parse_codec(world_.size == 1 ? "exact" : world_.parameters[index].codec);
    return static_cast<float>(1.0 - momentum_behind({codec.codec, codec.options}, world_.momentum));
  }

  void check(uint32_t index) const {
    const bool gathers = world_.collective == Collective::kAllReduce;
    const ParameterSpec& spec = world_.parameters[index];
    const bool momentum = world_.momentum != 0 && !in_warmup();
    const double alpha = momentum ? alpha_after_warmup(index) : 1.0;
    const double turn = turns_to_momentum() ? alpha_after_warmup(index) : 1.0;

    std::vector<double> sum(spec.num_elements, 0.0), size(spec.num_elements, 0.0);
    std::vector<double> given(spec.num_elements, 0.0);  // of all ranks together, where finite
    const double ranks = world_.size, nodes = static_cast<double>(world_.nodes.size());
    for (uint32_t rank = 0; rank < world_.size; ++rank) {
      const Elements gradient = gradient_of(world_, step_, rank, index);
      const Elements worker = layouts_.worker(rank, index, before(rank));
      const Elements worker_now = layouts_.worker(rank, index, after(rank));
      const Elements owner = layouts_.owner(rank, index, before(rank));
      const Elements owner_now = layouts_.owner(rank, index, after(rank));
      const double factor = gain(rank);
      for (size_t i = 0; i < sum.size(); ++i) {
        const double share = alpha * gradient[i] / ranks;
        const double kept = (factor * worker[i] - worker_now[i] / turn) / nodes;
        const double owed = factor * owner[i] - owner_now[i] / turn;
        sum[i] += share + kept + owed;
        if (std::isfinite(gradient[i])) given[i] += std::abs(gradient[i]);
        size[i] += std::abs(share) +
                   (std::abs(factor * worker[i]) + std::abs(worker_now[i])) / turn +
                   (std::abs(factor * owner[i]) + std::abs(owner_now[i])) / turn;
      }
    }
    for (uint32_t rank = 0; rank < world_.size; ++rank) {
      const Elements result = result_of(world_, of(rank), index);
      if (!world_.is_used(step_, index)) {
        expect_unchanged(rank, index, result, "that no rank used");
        expect_held(rank, index);
        continue;
      }
      if (!gathers && *spec.owner != rank) {
        expect_unchanged(rank, index, result, "that another rank owns");
        continue;
      }
      if (gathers && touches_residuals()) expect_undone(rank, index, result, given, turn);
      if (!keeps_all(spec)) continue;
      compare(rank, index, result, momentum ? 1.0 - alpha : 0.0, sum, size);
    }
  }

  // Whether there is a residual for all that the codec of this step withholds.
  bool keeps_all(const ParameterSpec& spec) const {
    const std::string& codec = in_warmup() ? spec.warmup : spec.codec;
    if (world_.size == 1 || codec == "exact") return true;
    return spec.worker_residual &&
           (spec.owner_residual || world_.collective == Collective::kReduceScatter);
  }

  void expect_unchanged(uint32_t rank, uint32_t index, const Elements& result,
                        const char* whose) const {
    const Elements given = gradient_of(world_, step_, rank, index);
    for (size_t i = 0; i < given.size(); ++i) {
      const bool equal = given[i] == result[i] || (std::isnan(given[i]) && std::isnan(result[i]));
      expect(equal, std::string("another gradient of a parameter ") + whose, rank);
    }
  }

  // Residuals are as before, in the units that the state names now.
  void expect_held(uint32_t rank, uint32_t index) const {
    const float units = before(rank).loss_scale;
    const float factor = units == 0.0F ? 1.0F : after(rank).loss_scale / units;
    const auto compare = [&](const Elements& was, const Elements& is, const char* whose) {
      for (size_t i = 0; i < was.size(); ++i) {
        const float scaled = factor * static_cast<float>(was[i]);
        const double expected = std::isfinite(scaled) ? scaled : was[i];
        if (is[i] == expected) continue;
        throw Broken(where(step_, rank) + ": the " + whose + " residual of '" +
                     world_.parameters[index].name + "'[" + std::to_string(i) +
                     "], which no rank used, became " + std::to_string(is[i]) + " from " +
                     std::to_string(expected));
      }
    };
    compare(layouts_.worker(rank, index, before(rank)), layouts_.worker(rank, index, after(rank)),
            "worker");
    compare(layouts_.owner(rank, index, before(rank)), layouts_.owner(rank, index, after(rank)),
            "owner");
  }

  // Where an average is not finite, what this rank sent had no effect: its residual is as before,
  // in the units of this step, but for two roundings of numbers no larger than these.
  void expect_undone(uint32_t rank, uint32_t index, const Elements& result,
                     const std::vector<double>& given, double turn) const {
    if (std::ranges::all_of(result, [](double value) { return std::isfinite(value); })) return;
    const Elements worker = layouts_.worker(rank, index, before(rank));
    const Elements now = layouts_.worker(rank, index, after(rank));
    const double factor = gain(rank);
    std::vector<double> size(result.size());
    // A node's sum is no larger than the ranks' together.
    for (size_t i = 0; i < size.size(); ++i) {
      size[i] = std::abs(factor * worker[i] * turn) + given[i];
    }
    for (size_t begin = 0; begin < result.size(); begin += kTileElements) {
      const size_t end = std::min<size_t>(result.size(), begin + kTileElements);
      double largest = 0;
      for (size_t i = begin; i < end; ++i) largest = std::max(largest, size[i]);
      if (!(largest < std::numeric_limits<float>::max() / kTileElements)) continue;
      for (size_t i = begin; i < end; ++i) {
        const double expected = factor * worker[i] * turn;
        const double room = 16 * unit_of(ScalarType::kFloat32) * largest;
        if (std::isfinite(result[i]) || std::abs(now[i] - expected) <= room) continue;
        throw Broken(where(step_, rank) + ": the residual of '" + world_.parameters[index].name +
                     "'[" + std::to_string(i) + "], whose average is not finite, became " +
                     std::to_string(now[i]) + " from " + std::to_string(expected));
      }
    }
  }

  // Every rounding is of a number no larger than all terms together, `size`; within a tile, since
  // some codecs transform it: at most three on every rank, one per rank in the sum, and four of the
  // owner, in fp32. Then one to the gradient's dtype, and one of a node's sum.
  void compare(uint32_t rank, uint32_t index, const Elements& result, double beta,
               const std::vector<double>& sum, const std::vector<double>& size) const {
    const ParameterSpec& spec = world_.parameters[index];
    const double number = 3.0 * world_.size + world_.size + 6.0;
    constexpr double kLargest = std::numeric_limits<float>::max();
    constexpr double kTransforms =
        16;  // additions per element of a block of 4096, and of its way back
    for (size_t begin = 0; begin < result.size(); begin += kTileElements) {
      const size_t end = std::min<size_t>(result.size(), begin + kTileElements);
      double largest = 0;
      for (size_t i = begin; i < end; ++i) {
        if (std::isfinite(size[i])) largest = std::max(largest, size[i]);
      }
      const double slack = largest * unit_of(ScalarType::kFloat32) * (number + kTransforms * 2) +
                           smallest_of(spec.dtype) * number;
      for (size_t i = begin; i < end; ++i) {
        // A residual that fp32 cannot hold is kept as it was.
        if (!std::isfinite(result[i]) || !(size[i] * world_.size < kLargest)) continue;
        const double expected = sum[i] + beta * result[i];
        const double room = slack + unit_of(spec.dtype) * (2 * std::abs(result[i]) + 2 * size[i]);
        if (std::abs(expected - result[i]) <= room) continue;
        throw Broken(where(step_, rank) + ": '" + spec.name + "'[" + std::to_string(i) +
                     "] arrived as " + std::to_string(result[i]) + ", but " +
                     std::to_string(expected) + " went in and is not withheld");
      }
    }
  }

  const World& world_;
  const Seen& seen_;
  const Layouts& layouts_;
  const uint64_t step_;
};

// The first line, without the part that says who speaks.
std::string heart_of(const std::string& text) {
  std::string line = text.substr(0, text.find('\n'));
  const std::string lost = " lost contact with ";
  const size_t found = line.find(lost);
  if (found != std::string::npos) line = line.substr(found);
  return line;
}

}  // namespace

void expect_calm(const World& world, const Seen& seen) {
  const RankSeen& first = seen.ranks[0];
  if (first.error) {
    const std::string text = first.error->what();
    if (!world.raise_nonfinite || text.find(" not finite at step ") == std::string::npos) {
      throw Broken("an error where nothing went wrong: " + text);
    }
  } else if (seen.duration.count() != 0) {
    throw Broken("ranks waited for " + std::to_string(seen.duration.count()) +
                 " ms where nothing went wrong");
  }
  for (uint32_t rank = 0; rank < world.size; ++rank) {
    const RankSeen& other = seen.ranks[rank];
    const bool equal =
        other.error.has_value() == first.error.has_value() &&
        (!first.error || heart_of(other.error->what()) == heart_of(first.error->what()));
    if (!equal) {
      const auto line = [](const RankSeen& of) {
        return "'" + (of.error ? heart_of(of.error->what()) : "") + "'";
      };
      throw Broken("rank " + std::to_string(rank) + " ended with " + line(other) +
                   ", rank 0 with " + line(first));
    }
  }
}

void expect_equal_ranks(const World& world, const Seen& seen) {
  if (world.collective == Collective::kReduceScatter) return;
  for (uint32_t rank = 1; rank < world.size; ++rank) {
    for (const auto& [number, step] : seen.ranks[rank].steps) {
      const auto& others = seen.ranks[0].steps;
      const auto other = others.find(number);
      if (other == others.end()) continue;
      for (size_t b = 0; b < step.buckets.size(); ++b) {
        // What no rank uses keeps what each had there.
        const bool all_used = std::ranges::all_of(
            world.buckets[b], [&](uint32_t index) { return world.is_used(number, index); });
        if (!all_used || step.buckets[b] == other->second.buckets[b]) continue;
        throw Broken(where(number, rank) + ": bucket " + std::to_string(b) +
                     " has other averages than on rank 0");
      }
    }
  }
}

void expect_nothing_lost(const World& world, const Seen& seen) {
  const Layouts layouts(world);
  for (uint64_t number = 0; number < world.steps.size(); ++number) {
    const bool complete = std::ranges::all_of(
        seen.ranks, [&](const RankSeen& rank) { return rank.steps.contains(number); });
    if (complete && seen.ranks[0].steps.at(number).before) {
      Balance(world, seen, layouts, number).check();
    }
  }
}

void expect_same_steps(const Seen& seen, const Seen& twin) {
  for (uint32_t rank = 0; rank < seen.ranks.size(); ++rank) {
    for (const auto& [number, step] : seen.ranks[rank].steps) {
      const auto& steps = twin.ranks[rank].steps;
      const auto other = steps.find(number);
      if (other == steps.end()) {
        throw Broken(where(number, rank) + ": ended well, but not where nothing went wrong");
      }
      for (size_t b = 0; b < step.buckets.size(); ++b) {
        if (step.buckets[b] == other->second.buckets[b]) continue;
        throw Broken(where(number, rank) + ": bucket " + std::to_string(b) +
                     " has other averages than where nothing went wrong, in another order");
      }
      if (!step.after || !other->second.after) continue;
      const SavedResiduals &after = step.after->residuals, &twins = other->second.after->residuals;
      // They are in units of the last loss scale, which a step without an exchange does not
      // compare.
      const float units = after.loss_scale == 0.0F ? 1.0F : twins.loss_scale / after.loss_scale;
      if (!same({after.worker * units, after.owner * units}, twins)) {
        throw Broken(where(number, rank) +
                     ": other residuals than where nothing went wrong, in another order");
      }
    }
  }
}

void expect_named_errors(const World& world, const Seen& seen) {
  constexpr std::chrono::milliseconds kMore{2000};  // than the timeout
  std::string first;
  for (uint32_t rank = 0; rank < world.size; ++rank) {
    const RankSeen& of = seen.ranks[rank];
    if (!of.has_ended || !of.error) continue;
    const std::string text = of.error->what();
    const std::string heart = heart_of(text);
    if (text.find("step ") == std::string::npos && heart.find("planned") == std::string::npos &&
        heart.find("a bucket holds") == std::string::npos) {
      throw Broken("rank " + std::to_string(rank) + " does not say where: " + text);
    }
    // A NaN is an error by itself, which a rank may meet before it hears of the other one; and two
    // messages that changed places are two faults.
    const bool another = world.fault.mishap == Mishap::kSwap ||
                         heart.find(" not finite at step ") != std::string::npos;
    if (first.empty() && !another) first = heart;
    const bool equal =
        heart.find(first) != std::string::npos || first.find(heart) != std::string::npos;
    if (!another && !equal) {
      throw Broken("rank " + std::to_string(rank) + " ends with '" + heart + "', another with '" +
                   first + "'");
    }
    if (of.later_error != text) {
      throw Broken("rank " + std::to_string(rank) + " ends with '" + text + "', then says '" +
                   of.later_error + "'");
    }
  }
  if (seen.duration > kTimeout + kMore) {
    throw Broken("ranks ended after " + std::to_string(seen.duration.count()) + " ms");
  }
}

std::vector<std::vector<float>> still_missing(const World& world,
                                              const std::vector<EngineState>& states) {
  const Layouts layouts(world);
  std::vector<std::vector<float>> missing;
  for (uint32_t i = 0; i < world.parameters.size(); ++i) {
    std::vector<float>& sum = missing.emplace_back();
    if (!world.parameters[i].worker_residual) continue;
    sum.assign(world.parameters[i].num_elements, 0.0F);
    for (uint32_t rank = 0; rank < world.size; ++rank) {
      const Elements worker = layouts.worker(rank, i, states[rank].residuals);
      const Elements owner = layouts.owner(rank, i, states[rank].residuals);
      for (size_t e = 0; e < sum.size(); ++e) {
        sum[e] +=
            static_cast<float>(worker[e] / static_cast<double>(world.nodes.size()) + owner[e]);
      }
    }
  }
  return missing;
}

}  // namespace gradferry::sim
