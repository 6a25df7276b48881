// The gradients of a world.
#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/faults/sim/play.h"

namespace gradferry::sim {
namespace {

double largest(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat16: return 65504.0;
    case ScalarType::kFloat64: return 1e300;
    default: return 3e38;
  }
}

double tiniest(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat16: return std::ldexp(1.0, -24);
    case ScalarType::kFloat64: return std::ldexp(1.0, -1074);
    case ScalarType::kBFloat16: return std::ldexp(1.0, -133);
    case ScalarType::kFloat32: return std::ldexp(1.0, -149);
  }
  return 0;
}

double draw(Random& random, Numbers numbers, ScalarType dtype) {
  const double uniform = static_cast<double>(random.next() >> 11) / 0x1p52 - 1.0;
  switch (numbers) {
    case Numbers::kWhole: return static_cast<double>(random.below(17)) - 8.0;
    case Numbers::kZeros: return random.below(2) == 0 ? 0.0 : -0.0;
    case Numbers::kWide: return std::ldexp(uniform, static_cast<int>(random.below(81)) - 40);
    case Numbers::kTiny: return tiniest(dtype) * std::round(uniform * 7);
    case Numbers::kHuge: return largest(dtype) * uniform;
    default: return uniform;
  }
}

}  // namespace

at::ScalarType torch_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat32: return at::kFloat;
    case ScalarType::kBFloat16: return at::kBFloat16;
    case ScalarType::kFloat16: return at::kHalf;
    case ScalarType::kFloat64: return at::kDouble;
  }
  return at::kFloat;
}

std::vector<double> gradient_of(const World& world, uint64_t step, uint32_t rank,
                                uint32_t parameter) {
  const ParameterSpec& spec = world.parameters[parameter];
  const Numbers numbers = world.steps[step].numbers[parameter];
  Random random = Random::of(world.data_seed, step, rank, parameter);
  std::vector<double> values(spec.num_elements);
  for (double& value : values) value = draw(random, numbers, spec.dtype);
  // One element of one rank, the same for all.
  Random shared = Random::of(world.data_seed, step, parameter);
  if (numbers >= Numbers::kNaN && !values.empty() && shared.below(world.size) == rank) {
    values[shared.below(values.size())] = numbers == Numbers::kNaN
                                              ? std::numeric_limits<double>::quiet_NaN()
                                              : -std::numeric_limits<double>::infinity();
  }
  // Ranks that did not use it give zeros; what no rank used is some old gradient.
  const bool used_here = world.steps[step].used[rank][parameter] != 0;
  if (!used_here && world.is_used(step, parameter)) std::ranges::fill(values, 0.0);
  // As the dtype holds them.
  at::Tensor tensor =
      at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kDouble);
  tensor.copy_(tensor.to(torch_dtype(spec.dtype)));
  return values;
}

}  // namespace gradferry::sim
