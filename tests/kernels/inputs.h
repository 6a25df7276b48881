// Seeded inputs that have broken gradient compressors before.
#pragma once

#include <cfloat>
#include <random>
#include <string_view>
#include <vector>

#include "gradferry/codec.h"

namespace gradferry::testing {

enum class Input { kGaussian, kHeavyTail, kWideRange, kTiny, kHuge, kNonFinite, kSparse, kTies };
inline constexpr Input kInputs[] = {Input::kGaussian, Input::kHeavyTail, Input::kWideRange,
                                    Input::kTiny,     Input::kHuge,      Input::kNonFinite,
                                    Input::kSparse,   Input::kTies};

inline double draw(Input input, std::mt19937_64& random) {
  std::normal_distribution<double> gaussian;
  std::uniform_real_distribution<double> uniform(-1, 1);
  const double sign = uniform(random) < 0 ? -1 : 1;
  switch (input) {
    case Input::kGaussian: return 1e-3 * gaussian(random);
    case Input::kHeavyTail: return 1e-4 * gaussian(random) / (1e-3 + std::fabs(uniform(random)));
    case Input::kWideRange: return sign * std::pow(10.0, 38 * uniform(random));
    case Input::kTiny: return gaussian(random) * 1e-40;  // subnormal in fp32
    case Input::kHuge: return sign * FLT_MAX * (1 - 0.2 * std::fabs(uniform(random)));
    case Input::kNonFinite: {
      const double x = uniform(random);
      if (x > 0.9985) return sign * INFINITY;
      if (x < -0.9985) return NAN;
      return x;
    }
    case Input::kSparse: {
      const double x = gaussian(random);
      return std::fabs(x) < 2.5 ? (x < 0 ? -0.0 : 0.0) : x;
    }
    case Input::kTies: return sign * std::ldexp(std::floor(8 * std::fabs(uniform(random))), -3);
  }
  return 0;
}

inline std::vector<double> make_input(Input input, size_t n, uint64_t seed) {
  std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(input));
  std::vector<double> result(n);
  for (double& x : result) x = draw(input, random);
  return result;
}

// Residuals are finite.
inline std::vector<float> make_residual(Input input, size_t n, uint64_t seed) {
  const Input source = input == Input::kNonFinite ? Input::kGaussian : input;
  std::vector<float> result(n);
  const std::vector<double> values = make_input(source, n, seed + 77);
  for (size_t i = 0; i < n; ++i) result[i] = static_cast<float>(0.25 * values[i]);
  return result;
}

}  // namespace gradferry::testing
