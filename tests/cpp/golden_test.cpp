// Payloads, residuals and results recorded in tests/golden: the wire format does not change by
// accident. GRADFERRY_WRITE_GOLDEN=1 writes the files anew, which needs a new wire version.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "tests/cpp/codec_runner.h"

namespace gradferry::testing {
namespace {

std::string golden_path(const std::string& name) {
  return std::string(GRADFERRY_GOLDEN_DIR) + "/" + name + ".bin";
}

void expect_golden(const std::string& name, const Buffer& found) {
  const auto* bytes = reinterpret_cast<const char*>(found.data());
  if (std::getenv("GRADFERRY_WRITE_GOLDEN") != nullptr) {
    std::ofstream(golden_path(name), std::ios::binary)
        .write(bytes, static_cast<std::streamsize>(found.size()));
  }
  std::ifstream file(golden_path(name), std::ios::binary);
  ASSERT_TRUE(file) << "missing " << golden_path(name);
  const std::string expected{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(expected == std::string(bytes, found.size())) << name << " differs";
}

// Magnitudes over 30 powers of two, every sign, from integers alone: element i of rank r is
// m * 2^e with the bits of a 32-bit congruential generator.
std::vector<double> golden_numbers(uint32_t n, uint32_t rank) {
  std::vector<double> result(n);
  uint32_t state = 12345 + rank;
  for (double& x : result) {
    state = state * 1664525u + 1013904223u;
    const int m = static_cast<int>((state >> 8) % 2047) - 1023;
    x = std::ldexp(m, -20 - static_cast<int>(state >> 28) * (rank == 0 ? 1 : 2));
  }
  return result;
}

TEST(GoldenFiles, StillDescribeTheWireFormat) {
  for (const std::string codec : {"exact", "bf16", "q4"}) {
    for (const Isa isa : available_isas()) {
      CallSetup setup;
      setup.codec = codec;
      setup.sizes = {1100};  // one whole group, blocks, and a ragged end
      const Runner run(setup);
      const bool keeps_residual = run.codec(isa).lossy;
      std::vector<Buffer> payloads, residuals(2);
      for (uint32_t rank = 0; rank < 2; ++rank) {
        const Buffer gradient = run.gradient_from(golden_numbers(1100, rank));
        const Buffer zero = run.residual_from(std::vector<float>(1100, 0.0f));
        const Result r = run.encode(isa, gradient, keeps_residual ? zero : Buffer());
        const std::string suffix = "_rank" + std::to_string(rank);
        expect_golden("gradient" + suffix, gradient);
        expect_golden(codec + "_payload" + suffix, r.payload);
        if (keeps_residual) expect_golden(codec + "_residual" + suffix, r.residual);
        payloads.push_back(r.payload);
      }
      const Result reduced = run.reduce(isa, payloads, Buffer());
      expect_golden(codec + "_reduced", reduced.payload);
      expect_golden(codec + "_decoded",
                    run.decode(isa, reduced.payload, Buffer(), Stage::kOwner).gradient);
    }
  }
}

}  // namespace
}  // namespace gradferry::testing
