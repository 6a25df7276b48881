// What every codec promises of residuals that it keeps: in held zero tiles and non-finite units, in
// the units of the gradient that comes with them.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/kernels/contract_cases.h"
#include "tests/kernels/inputs.h"

namespace gradferry::testing {
namespace {

class KeptResiduals : public ContractTest {};

TEST_P(KeptResiduals, AllZeroTileIsHeldAndItsResidualKept) {
  CallSetup s = setup({4096, 50, 1024});
  s.hold_zero_tiles = true;
  const Runner run(s);
  const size_t n = run.num_elements();
  std::vector<double> input(n, 0.0);
  for (size_t i = 0; i < n; i += 3) input[i] = -0.0;
  input[4096 + 49] = 0.125;  // the second tile is zero but for its last element
  const Buffer gradient = run.gradient_from(input);
  const std::vector<float> old = make_residual(Input::kGaussian, n, 72);
  for (const Isa isa : available_isas()) {
    const Result encoded = run.encode(isa, gradient, run.residual_from(old));
    const std::vector<float> kept = encoded.residual.as<float>();
    const Result reduced =
        run.reduce(isa, {encoded.payload, encoded.payload}, run.residual_from(old));
    const std::vector<float> owner_kept = reduced.residual.as<float>();
    for (const size_t tile : {0, 2}) {
      const Tile& t = run.tiles()[tile];
      for (uint32_t i = 0; i < run.payload_bytes(t.num_elements, Stage::kWorker); ++i) {
        ASSERT_EQ(encoded.payload.data()[t.payload_offset + i], std::byte(0));
      }
      for (uint32_t i = 0; i < run.payload_bytes(t.num_elements, Stage::kOwner); ++i) {
        ASSERT_EQ(reduced.payload.data()[t.output_offset + i], std::byte(0));
      }
      for (size_t i = t.residual_offset; i < t.residual_offset + t.num_elements; ++i) {
        ASSERT_EQ(float_bits(kept[i]), float_bits(old[i]));
        ASSERT_EQ(float_bits(owner_kept[i]), float_bits(old[i]));
      }
      EXPECT_EQ(encoded.status[tile].checksum, 0u);
      EXPECT_EQ(encoded.status[tile].flags, 0u);
      EXPECT_EQ(reduced.status[tile].checksum, 0u);
    }
    EXPECT_NE(encoded.status[1].checksum, 0u);
    const Result decoded = run.decode(isa, encoded.payload, Buffer(), Stage::kWorker);
    const uint32_t item = item_bytes(s.dtype);
    for (size_t i = 0; i < 4096 * item; ++i) ASSERT_EQ(decoded.gradient.data()[i], std::byte(0));
  }
}

TEST_P(KeptResiduals, HeldZeroTileKeepsItsResidualInTheNewUnits) {
  for (const float gain : {0.5f, 2.0f}) {
    CallSetup s = setup({4096, 50, 1024, 7});
    s.hold_zero_tiles = true;
    s.gain = gain;
    const Runner run(s);
    const size_t n = run.num_elements();
    const Buffer gradient = run.gradient_from(std::vector<double>(n, 0.0));
    const std::vector<float> old = residual_beyond(gain, n, 73);
    for (const Isa isa : available_isas()) {
      const Result encoded = run.encode(isa, gradient, run.residual_from(old));
      const Result reduced =
          run.reduce(isa, {encoded.payload, encoded.payload}, run.residual_from(old));
      const std::vector<float> kept = encoded.residual.as<float>();
      const std::vector<float> owner_kept = reduced.residual.as<float>();
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(float_bits(kept[i]), float_bits(kept_by(gain, old[i]))) << i;
        ASSERT_EQ(float_bits(owner_kept[i]), float_bits(kept_by(gain, old[i]))) << i;
      }
    }
  }
}

// Every element is in a non-finite unit, whatever the codec's unit is.
TEST_P(KeptResiduals, NonFiniteUnitKeepsItsResidualInTheNewUnits) {
  for (const float gain : {0.5f, 2.0f}) {
    CallSetup s = setup({4096, 50, 1024, 7});
    s.gain = gain;
    const Runner run(s);
    const size_t n = run.num_elements();
    const Buffer gradient = run.gradient_from(std::vector<double>(n, INFINITY));
    const std::vector<float> old = residual_beyond(gain, n, 74);
    for (const Isa isa : available_isas()) {
      const Result encoded = run.encode(isa, gradient, run.residual_from(old));
      const Result reduced =
          run.reduce(isa, {encoded.payload, encoded.payload}, run.residual_from(old));
      const std::vector<float> kept = encoded.residual.as<float>();
      const std::vector<float> owner_kept = reduced.residual.as<float>();
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(float_bits(kept[i]), float_bits(kept_by(gain, old[i]))) << i;
        ASSERT_EQ(float_bits(owner_kept[i]), float_bits(kept_by(gain, old[i]))) << i;
      }
    }
  }
}

TEST_P(KeptResiduals, ZeroTileSendsItsResidualInMomentumMode) {
  const Runner run(setup({4096}));
  const Buffer gradient = run.gradient_from(std::vector<double>(4096, 0.0));
  const std::vector<float> old(4096, 0.5f);
  const Result encoded = run.encode(active_isa(), gradient, run.residual_from(old));
  EXPECT_NE(encoded.payload.as<uint32_t>(), std::vector<uint32_t>(encoded.payload.size() / 4, 0));
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, KeptResiduals, ::testing::ValuesIn(all_cases()), case_name);

}  // namespace
}  // namespace gradferry::testing
