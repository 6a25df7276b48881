// What the contract suite goes through, and what it compares: for every implementation that joins.
#pragma once

#include <cfloat>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "gradferry/codec.h"
#include "tests/kernels/codec_laws.h"
#include "tests/kernels/inputs.h"
#include "tests/kernels/option_sets.h"

namespace gradferry::testing {

struct Case {
  std::string codec;
  ScalarType dtype;
};

inline std::string dtype_name(ScalarType dtype) {
  constexpr const char* names[] = {"float32", "bfloat16", "float16", "float64"};
  return names[static_cast<size_t>(dtype)];
}

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.codec << " " << dtype_name(c.dtype);
}

// Defaults with every dtype, other options with fp32: no codec combines the two.
inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Codec& codec : cpu_codecs(Isa::kScalar)) {
    for (const ScalarType dtype : {ScalarType::kFloat32, ScalarType::kBFloat16,
                                   ScalarType::kFloat16, ScalarType::kFloat64}) {
      if (dtype == ScalarType::kFloat64 && !codec.supports_float64) continue;
      cases.push_back({std::string(codec.name), dtype});
    }
    for (const std::string& text : option_sets(codec)) {
      if (text != codec.name) cases.push_back({text, ScalarType::kFloat32});
    }
  }
  return cases;
}

// Every length up to one of the longest blocks, around a few of them, around the groups of 1024,
// and around a tile.
inline std::vector<uint32_t> edge_sizes() {
  std::vector<uint32_t> sizes(128 + 3);
  std::iota(sizes.begin(), sizes.end(), 1u);
  for (const uint32_t n : {255u, 257u, 383u, 511u, 512u, 513u, 2047u, 2049u, 3071u, 3073u}) {
    sizes.push_back(n);
  }
  for (const uint32_t center : {1024u, 4080u}) {
    for (const int offset : {-17, -16, -15, -1, 0, 1, 14, 15, 16}) {
      sizes.push_back(center + static_cast<uint32_t>(offset));
    }
  }
  sizes.insert(sizes.end(), {4096, 4096, 7, 4096});
  return sizes;
}

// Three elements overflow when they are multiplied by a gain above 1, and stay as they are; by one
// below 1 they become subnormal.
inline std::vector<float> residual_beyond(float gain, size_t n, uint64_t seed) {
  std::vector<float> residual = make_residual(Input::kGaussian, n, seed);
  for (size_t i = 0; i < 3; ++i) residual[i] = gain > 1 ? (i == 1 ? -FLT_MAX : FLT_MAX) : FLT_MIN;
  return residual;
}

// A suite over codecs, their options and dtypes.
class ContractTest : public ::testing::TestWithParam<Case> {
 protected:
  static CallSetup setup(std::vector<uint32_t> sizes) {
    CallSetup result;
    result.codec = GetParam().codec;
    result.dtype = GetParam().dtype;
    result.sizes = std::move(sizes);
    return result;
  }
};

inline std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return as_name(info.param.codec, "") + "_" + dtype_name(info.param.dtype);
}

}  // namespace gradferry::testing
