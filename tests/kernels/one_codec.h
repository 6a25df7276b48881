// What the tests of a single codec need: encode and decode fp32 numbers, and measure the error.
#pragma once

#include "tests/kernels/codec_runner.h"
#include "tests/kernels/inputs.h"

namespace gradferry::testing {

class OneCodec {
 public:
  OneCodec(std::string codec, std::vector<uint32_t> sizes)
      : run_(call(std::move(codec), std::move(sizes))) {}
  const Runner& run() const { return run_; }
  // residual empty: without error feedback
  Result encode(Isa isa, const std::vector<float>& v,
                const std::vector<float>& residual = {}) const {
    return run_.encode(isa, run_.gradient_from(std::vector<double>(v.begin(), v.end())),
                       Runner::residual_from(residual));
  }
  std::vector<float> decode(const Buffer& payload, uint32_t* flags = nullptr) const {
    const Result r = run_.decode(active_isa(), payload, Buffer(), Stage::kWorker);
    if (flags != nullptr) *flags = r.status[0].flags;
    return r.gradient.as<float>();
  }
  std::vector<float> round_trip(const std::vector<float>& v) const {
    return decode(encode(active_isa(), v).payload);
  }

 private:
  static CallSetup call(std::string codec, std::vector<uint32_t> sizes) {
    CallSetup setup;
    setup.codec = std::move(codec);
    setup.sizes = std::move(sizes);
    return setup;
  }
  Runner run_;
};

inline std::vector<float> floats(Input input, size_t n, uint64_t seed) {
  const std::vector<double> values = make_input(input, n, seed);
  std::vector<float> result(n);
  for (size_t i = 0; i < n; ++i) result[i] = static_cast<float>(values[i]);
  return result;
}

inline double squares(const std::vector<float>& v) {
  double sum = 0;
  for (const float x : v) sum += static_cast<double>(x) * x;
  return sum;
}

inline double squared_error(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(static_cast<double>(a[i]) - b[i], 2);
  return sum;
}

}  // namespace gradferry::testing
