// Gradients and residuals of any bits: what encode writes is well-formed, the same on every
// instruction set, and the residual is what it withholds, and finite.
#include <cmath>
#include <vector>

#include "gradferry/wire.h"
#include "tests/fuzz/codec_calls.h"
#include "tests/kernels/contract_cases.h"

namespace gradferry::fuzzing {
namespace {

// v of an element, in the arithmetic of the dtype.
double to_send(const CallSetup& setup, double gradient, float residual, bool has_residual) {
  if (setup.dtype == ScalarType::kFloat64) {
    const double v = double{setup.alpha} * gradient;
    return has_residual ? v + double{setup.gain} * double{residual} : v;
  }
  const float v = setup.alpha * static_cast<float>(gradient);
  return has_residual ? v + setup.gain * residual : v;
}

bool is_zero(const std::vector<double>& gradient, const Tile& tile) {
  const auto begin = gradient.begin() + static_cast<std::ptrdiff_t>(tile.gradient_offset);
  return std::all_of(begin, begin + tile.num_elements, [](double x) { return x == 0; });
}

void check_encoded(const CallSetup& setup, const Runner& run, const Buffer& gradient,
                   const Buffer& residual, const Result& encoded) {
  const std::vector<double> g = testing::numbers(setup.dtype, gradient);
  const std::vector<double> sent = testing::values(setup, encoded.payload, Stage::kWorker);
  const Result back = run.decode(Isa::kScalar, encoded.payload, Buffer(), Stage::kWorker);
  const std::vector<float> old = residual.as<float>(), updated = encoded.residual.as<float>();
  const bool has_residual = !old.empty();
  for (size_t t = 0; t < run.tiles().size(); ++t) {
    const Tile& tile = run.tiles()[t];
    const uint32_t bytes = run.payload_bytes(tile.num_elements, Stage::kWorker);
    const std::byte* payload = encoded.payload.data() + tile.payload_offset;
    ASSERT_EQ(back.status[t].flags & kTileCorrupt, 0) << "tile " << t;
    ASSERT_EQ(encoded.status[t].checksum, word_sum(payload, bytes, tile.message_offset));
    const bool held = setup.hold_zero_tiles && is_zero(g, tile);
    if (held) {
      ASSERT_TRUE(
          std::all_of(payload, payload + bytes, [](std::byte b) { return b == std::byte(); }))
          << "tile " << t;
    }
    for (uint64_t i = tile.gradient_offset; i < tile.gradient_offset + tile.num_elements; ++i) {
      const double v = to_send(setup, g[i], has_residual ? old[i] : 0.0F, has_residual);
      ASSERT_TRUE(held || std::isfinite(v) || !std::isfinite(sent[i])) << "element " << i;
      if (!has_residual) continue;
      const float kept = testing::kept_by(setup.gain, old[i]);
      const double withheld = setup.dtype == ScalarType::kFloat64
                                  ? v - sent[i]
                                  : static_cast<float>(v) - static_cast<float>(sent[i]);
      const float expected = held ? kept : testing::kept_unless_finite(withheld, kept);
      ASSERT_TRUE(std::isfinite(updated[i])) << "element " << i;
      ASSERT_EQ(testing::float_bits(updated[i]), testing::float_bits(expected))
          << "element " << i << " of " << setup.codec;
    }
  }
}

}  // namespace

void run(Bytes input) {
  const CallSetup setup = take_setup(input);
  const Runner run(setup);
  const Buffer gradient = take_gradient(input, run);
  const Buffer residual = input.flip() ? take_residual(input, run) : Buffer();
  const Result encoded = run.encode(Isa::kScalar, gradient, residual);
  for (const Isa isa : available_isas()) {
    const Result other = run.encode(isa, gradient, residual, 0x3c);
    EXPECT_TRUE(other.payload == encoded.payload) << isa_name(isa);
    EXPECT_TRUE(other.residual == encoded.residual) << isa_name(isa);
    ASSERT_TRUE(testing::same_status(other.status, encoded.status)) << isa_name(isa);
  }
  check_encoded(setup, run, gradient, residual, encoded);
}

}  // namespace gradferry::fuzzing
