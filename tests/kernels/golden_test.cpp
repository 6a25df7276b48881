// Payloads, residuals and results recorded in tests/kernels/golden: the wire format does not change
// by accident. To write them anew needs a new wire version (tests/kernels/golden/README.md): with
// GRADFERRY_WRITE_GOLDEN=FOLDER what is found is written to FOLDER/<archive>/<name>.bin.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "tests/kernels/archive.h"
#include "tests/kernels/codec_runner.h"
#include "tests/kernels/option_sets.h"

namespace gradferry::testing {
namespace {

const std::map<std::string, std::string>& golden_archive(const std::string& name) {
  static std::map<std::string, std::map<std::string, std::string>> archives;
  auto found = archives.find(name);
  if (found == archives.end()) {
    found = archives.emplace(name, read_archive(GRADFERRY_GOLDEN_DIR "/" + name + ".tar")).first;
  }
  return found->second;
}

void expect_golden(const std::string& archive, const std::string& name, const std::string& found) {
  if (const char* folder = std::getenv("GRADFERRY_WRITE_GOLDEN")) {
    const std::filesystem::path path = std::filesystem::path(folder) / archive;
    std::filesystem::create_directories(path);
    std::ofstream(path / (name + ".bin"), std::ios::binary) << found;
    return;
  }
  EXPECT_TRUE(golden_archive(archive).at(name + ".bin") == found)
      << name << " of " << archive << " differs";
}

template <class Bytes>
std::string as_string(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
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

constexpr uint32_t kElements = 1100;  // one whole group, blocks, and a ragged end

// The codec string with '_' for what separates options.
std::string stem(const std::string& codec) { return as_name(codec, ".="); }

Runner runner(const std::string& codec) {
  CallSetup setup;
  setup.codec = codec;
  setup.sizes = {kElements};
  return Runner(setup);
}

TEST(GoldenFiles, StillDescribeTheWireFormat) {
  for (const std::string& codec : all_codecs()) {
    for (const Isa isa : available_isas()) {
      const Runner run = runner(codec);
      const std::string archive(run.codec(isa).name);
      const bool keeps_residual = run.codec(isa).lossy;
      std::vector<Buffer> payloads, residuals(2);
      for (uint32_t rank = 0; rank < 2; ++rank) {
        const Buffer gradient = run.gradient_from(golden_numbers(kElements, rank));
        const Buffer zero = run.residual_from(std::vector<float>(kElements, 0.0f));
        const Result r = run.encode(isa, gradient, keeps_residual ? zero : Buffer());
        const std::string suffix = "_rank" + std::to_string(rank);
        expect_golden("gradient", "gradient" + suffix, as_string(gradient));
        expect_golden(archive, stem(codec) + "_payload" + suffix, as_string(r.payload));
        if (keeps_residual)
          expect_golden(archive, stem(codec) + "_residual" + suffix, as_string(r.residual));
        payloads.push_back(r.payload);
      }
      const Result reduced = run.reduce(isa, payloads, Buffer());
      expect_golden(archive, stem(codec) + "_reduced", as_string(reduced.payload));
      expect_golden(archive, stem(codec) + "_decoded",
                    as_string(run.decode(isa, reduced.payload, Buffer(), Stage::kOwner).gradient));
      payloads.push_back(payloads[0]);
      expect_golden(archive, stem(codec) + "_accumulated",
                    as_string(run.accumulate(isa, payloads, 3).gradient));
    }
  }
}

}  // namespace
}  // namespace gradferry::testing
