// What every codec promises, for every codec of the table, its options, gradient dtype and
// instruction set.
#include <gtest/gtest.h>

#include "gradferry/wire.h"
#include "tests/kernels/codec_runner.h"
#include "tests/kernels/contract_cases.h"
#include "tests/kernels/inputs.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gradferry::testing {
namespace {

class CodecContract : public ContractTest {};

TEST_P(CodecContract, GivesTheSameBytesOnEveryInstructionSet) {
  for (const Input input : kInputs) {
    for (const bool misaligned : {false, true}) {
      CallSetup s = setup(edge_sizes());
      s.misaligned = misaligned;
      s.alpha = misaligned ? 0.1f : 1.0f;
      s.gain = misaligned ? 0.5f : 1.0f;
      s.beta = 0.9f;
      s.hold_zero_tiles = misaligned;
      const Runner run(s);
      const size_t n = run.num_elements();
      const Buffer gradient = run.gradient_from(make_input(input, n, 1));
      const Buffer other = run.gradient_from(make_input(input, n, 2));
      const Buffer residual = run.residual_from(make_residual(input, n, 3));
      const Result scalar = run.encode(Isa::kScalar, gradient, residual);
      const Result plain = run.encode(Isa::kScalar, other, Buffer());
      const std::vector<Buffer> payloads = {scalar.payload, plain.payload, scalar.payload};
      const Result reduced = run.reduce(Isa::kScalar, payloads, residual);
      const Result averaged = run.reduce(Isa::kScalar, payloads, Buffer());
      const Result accumulated = run.accumulate(Isa::kScalar, payloads, 3);
      const Result decoded = run.decode(Isa::kScalar, reduced.payload, residual, Stage::kOwner);
      const Result undone =
          run.undo(Isa::kScalar, scalar.payload, reduced.payload, gradient, residual);
      for (const Isa isa : available_isas()) {
        SCOPED_TRACE(std::string(isa_name(isa)) + " input " +
                     std::to_string(static_cast<int>(input)));
        // Another fill: a byte that is not written would differ.
        ASSERT_TRUE(same_result(run.encode(isa, gradient, residual, 0x3c), scalar));
        ASSERT_TRUE(same_result(run.encode(isa, other, Buffer(), 0x3c), plain));
        ASSERT_TRUE(same_result(run.reduce(isa, payloads, residual), reduced));
        ASSERT_TRUE(same_result(run.reduce(isa, payloads, Buffer()), averaged));
        ASSERT_TRUE(same_result(run.accumulate(isa, payloads, 3), accumulated));
        ASSERT_TRUE(
            same_result(run.decode(isa, reduced.payload, residual, Stage::kOwner), decoded));
        for (const bool with_status : {true, false}) {
          ASSERT_TRUE(same_result(
              run.undo(isa, scalar.payload, reduced.payload, gradient, residual, with_status),
              undone));
        }
      }
    }
  }
}

// One tile per call, every buffer exactly as long as it must be.
TEST_P(CodecContract, StaysInsideEveryBufferOfASingleTile) {
  for (uint32_t n : edge_sizes()) {
    CallSetup s = setup({n});
    s.misaligned = n % 2 == 1;
    s.beta = 0.5f;
    const Runner run(s);
    const Buffer gradient = run.gradient_from(make_input(Input::kGaussian, n, n));
    const Buffer residual = run.residual_from(make_residual(Input::kGaussian, n, n));
    for (const Isa isa : available_isas()) {
      const Result encoded = run.encode(isa, gradient, residual);
      const Result reduced = run.reduce(isa, {encoded.payload, encoded.payload}, residual);
      run.accumulate(isa, {encoded.payload, encoded.payload}, 2);
      run.decode(isa, reduced.payload, residual, Stage::kOwner);
      std::vector<double> lost = make_input(Input::kGaussian, n, n);
      lost[n / 2] = double(NAN);
      const Buffer sent = run.encode(isa, run.gradient_from(lost), Buffer()).payload;
      const Result nothing = run.reduce(isa, {encoded.payload, sent}, residual);
      run.undo(isa, encoded.payload, nothing.payload, gradient, residual);
    }
  }
}

TEST_P(CodecContract, PayloadSizesAreAlignedAndGrowWithTheTile) {
  const Runner run(setup({1}));
  for (const Stage stage : {Stage::kWorker, Stage::kOwner}) {
    uint32_t last = 0;
    for (uint32_t n = 1; n <= kTileElements; ++n) {
      const uint32_t bytes = run.payload_bytes(n, stage);
      ASSERT_EQ(bytes % kPayloadAlignment, 0u);
      ASSERT_GE(bytes, last);
      last = bytes;
    }
  }
}

TEST_P(CodecContract, ChecksumIsTheWordSumOfThePayload) {
  const Runner run(setup(edge_sizes()));
  const size_t n = run.num_elements();
  const Buffer gradient = run.gradient_from(make_input(Input::kGaussian, n, 5));
  const Result encoded = run.encode(active_isa(), gradient, Buffer());
  const Result reduced = run.reduce(active_isa(), {encoded.payload}, Buffer());
  for (size_t i = 0; i < run.tiles().size(); ++i) {
    const Tile& tile = run.tiles()[i];
    ASSERT_EQ(encoded.status[i].checksum,
              word_sum(encoded.payload.data() + tile.payload_offset,
                       run.payload_bytes(tile.num_elements, Stage::kWorker), tile.message_offset));
    ASSERT_EQ(reduced.status[i].checksum,
              word_sum(reduced.payload.data() + tile.output_offset,
                       run.payload_bytes(tile.num_elements, Stage::kOwner), tile.message_offset));
  }
}

// residual' = fl(v - D(p)) exactly, or what is kept where that is not finite. The sum
// D(p) + residual' then differs from v by one rounding at most.
TEST_P(CodecContract, ResidualIsWhatThePayloadWithholds) {
  for (const Input input : kInputs) {
    CallSetup s = setup({1, 33, 4096, 1500, 31});
    s.alpha = 0.75f;
    s.gain = 2.0f;
    const Runner run(s);
    const size_t n = run.num_elements();
    const Buffer gradient = run.gradient_from(make_input(input, n, 11));
    const std::vector<float> old = make_residual(input, n, 12);
    const Result encoded = run.encode(active_isa(), gradient, run.residual_from(old));
    const std::vector<double> g = numbers(s.dtype, gradient);
    const std::vector<double> sent = values(s, encoded.payload, Stage::kWorker);
    const std::vector<float> updated = encoded.residual.as<float>();
    for (size_t i = 0; i < n; ++i) {
      const double v = combine(s.alpha, g[i], s.gain, old[i]);
      const float expected = withheld(v, sent[i], kept_by(s.gain, old[i]));
      ASSERT_EQ(float_bits(updated[i]), float_bits(expected)) << "element " << i;
    }
  }
}

TEST_P(CodecContract, ReduceIsTheScaledSumInRankOrderEncodedAgain) {
  for (const Input input : kInputs) {
    for (const uint32_t world_size : {1u, 3u, 9u}) {
      CallSetup s = setup({5, 4096, 1030});
      s.gain = 0.5f;
      const Runner run(s);
      const size_t n = run.num_elements();
      std::vector<Buffer> payloads;
      std::vector<double> v(n);
      for (uint32_t rank = 0; rank < world_size; ++rank) {
        const Buffer gradient = run.gradient_from(make_input(input, n, 20 + rank));
        payloads.push_back(run.encode(Isa::kScalar, gradient, Buffer()).payload);
        const std::vector<double> sent = values(s, payloads.back(), Stage::kWorker);
        for (size_t i = 0; i < n; ++i) v[i] = rank == 0 ? sent[i] : combine(1, v[i], 1, sent[i]);
      }
      const std::vector<float> old = make_residual(input, n, 30);
      const double inverse =
          is_float64() ? 1.0 / world_size : 1.0f / static_cast<float>(world_size);
      for (size_t i = 0; i < n; ++i) v[i] = combine(inverse, v[i], s.gain, old[i]);

      const Result reduced = run.reduce(active_isa(), payloads, run.residual_from(old));
      const std::vector<double> sent = values(s, reduced.payload, Stage::kOwner);
      const std::vector<float> updated = reduced.residual.as<float>();
      for (size_t i = 0; i < n; ++i) {
        const float expected = withheld(v[i], sent[i], kept_by(s.gain, old[i]));
        ASSERT_EQ(float_bits(updated[i]), float_bits(expected));
      }
      // The payload is C(v): what encoding v as a gradient at the owner's stage would write.
      if (run.codec(Isa::kScalar).lossy) {
        CallSetup wide = s;
        wide.dtype = ScalarType::kFloat32;
        const Runner wide_run(wide);
        const Buffer as_gradient = wide_run.gradient_from(v);
        if (run.payload_bytes(4096, Stage::kWorker) == run.payload_bytes(4096, Stage::kOwner)) {
          ASSERT_TRUE(wide_run.encode(Isa::kScalar, as_gradient, Buffer()).payload ==
                      reduced.payload);
        }
      } else {
        for (size_t i = 0; i < n; ++i) {
          std::byte expected[8];
          write_number(s.dtype, v[i], expected);
          const double rounded = read_number(s.dtype, expected);
          ASSERT_EQ(std::isnan(rounded), std::isnan(sent[i]));
          if (!std::isnan(rounded)) {
            ASSERT_EQ(rounded, sent[i]);
          }
        }
      }
    }
  }
}

TEST_P(CodecContract, DecodeRoundsToTheGradientsDtypeAndAddsMomentum) {
  for (const Input input : kInputs) {
    CallSetup s = setup({4096, 77, 1024});
    s.beta = 0.9f;
    const Runner run(s);
    const size_t n = run.num_elements();
    const Buffer gradient = run.gradient_from(make_input(input, n, 41));
    const Result encoded = run.encode(Isa::kScalar, gradient, Buffer());
    const std::vector<double> sent = values(s, encoded.payload, Stage::kWorker);
    const std::vector<float> old = make_residual(input, n, 42);
    const Result decoded =
        run.decode(active_isa(), encoded.payload, run.residual_from(old), Stage::kWorker);
    const std::vector<float> updated = decoded.residual.as<float>();
    const uint32_t item = item_bytes(s.dtype);
    std::vector<bool> finite(run.tiles().size(), true);
    for (size_t i = 0; i < n; ++i) {
      std::byte expected[8];
      write_number(s.dtype, sent[i], expected);
      ASSERT_EQ(std::memcmp(expected, decoded.gradient.data() + i * item, item), 0) << i;
      const size_t tile = i < 4096 ? 0 : i < 4096 + 77 ? 1 : 2;
      if (!std::isfinite(read_number(s.dtype, expected))) finite[tile] = false;
      const double momentum = std::isfinite(read_number(s.dtype, expected))
                                  ? combine(1, old[i], s.beta, sent[i])
                                  : double(NAN);
      ASSERT_EQ(float_bits(updated[i]), float_bits(kept_unless_finite(momentum, old[i]))) << i;
    }
    for (size_t tile = 0; tile < finite.size(); ++tile) {
      ASSERT_EQ(decoded.status[tile].flags, finite[tile] ? 0 : kTileNonFinite);
    }
  }
}

// residual' = fl(residual + fl(D(p) - fl(alpha * g))), where finite, for elements that arrive
// non-finite; here that is every second tile and some of the others.
TEST_P(CodecContract, UndoPutsBackWhatEncodeTook) {
  for (const Input input : kInputs) {
    CallSetup s = setup({2000, 63, 300, 4096});
    s.alpha = 0.1f;
    const Runner run(s);
    const size_t n = run.num_elements();
    const Buffer gradient = run.gradient_from(make_input(input, n, 51));
    const std::vector<float> old = make_residual(input, n, 52);
    const Result encoded = run.encode(Isa::kScalar, gradient, run.residual_from(old));
    std::vector<double> others(n, 1.0);
    std::fill(others.begin(), others.begin() + 2000, double(INFINITY));
    std::fill(others.begin() + 2063, others.begin() + 2363, double(NAN));
    others[2363 + 1000] = double(NAN);
    const Buffer sent_by_other =
        run.encode(Isa::kScalar, run.gradient_from(others), Buffer()).payload;
    const Buffer in = run.reduce(Isa::kScalar, {sent_by_other}, Buffer()).payload;
    const std::vector<double> arrived =
        numbers(s.dtype, run.decode(Isa::kScalar, in, Buffer(), Stage::kOwner).gradient);
    const Result undone = run.undo(active_isa(), encoded.payload, in, gradient, encoded.residual);
    uint32_t num_lost = 0;
    const std::vector<double> g = numbers(s.dtype, gradient);
    const std::vector<double> sent = values(s, encoded.payload, Stage::kWorker);
    const std::vector<float> between = encoded.residual.as<float>();
    const std::vector<float> updated = undone.residual.as<float>();
    for (size_t i = 0; i < n; ++i) {
      if (std::isfinite(arrived[i])) {
        ASSERT_EQ(float_bits(updated[i]), float_bits(between[i]));
        continue;
      }
      ++num_lost;
      double expected;
      if (is_float64()) {
        expected = between[i] + (sent[i] - static_cast<double>(s.alpha) * g[i]);
      } else {
        const float taken = s.alpha * static_cast<float>(g[i]);
        expected = between[i] + (static_cast<float>(sent[i]) - taken);
      }
      ASSERT_EQ(float_bits(updated[i]), float_bits(kept_unless_finite(expected, between[i])));
      // And that is the residual before, but for the roundings of v, v - D and the two sums here.
      if (input == Input::kGaussian) {
        const double scale = std::fabs(old[i]) + std::fabs(g[i]) + std::fabs(sent[i]);
        ASSERT_NEAR(updated[i], old[i], 4 * 0x1p-24 * scale);
      }
    }
    ASSERT_GE(num_lost, 2301u);
    ASSERT_LT(num_lost, n);
  }
}

TEST_P(CodecContract, NonFiniteInputNeverReachesAResidual) {
  CallSetup s = setup({4096, 4096, 100});
  s.beta = 0.9f;
  const Runner run(s);
  const size_t n = run.num_elements();
  for (const double poison : {double(NAN), double(INFINITY), -double(INFINITY)}) {
    std::vector<double> input = make_input(Input::kGaussian, n, 61);
    input[17] = poison;
    input[4096 + 4095] = poison;
    const Buffer gradient = run.gradient_from(input);
    const std::vector<float> old = make_residual(Input::kGaussian, n, 62);
    for (const Isa isa : available_isas()) {
      const Result encoded = run.encode(isa, gradient, run.residual_from(old));
      EXPECT_EQ(encoded.status[0].flags, kTileNonFinite);
      EXPECT_EQ(encoded.status[1].flags, kTileNonFinite);
      EXPECT_EQ(encoded.status[2].flags, 0u);
      const std::vector<float> kept = encoded.residual.as<float>();
      EXPECT_EQ(float_bits(kept[17]), float_bits(old[17]));
      const Result reduced = run.reduce(isa, {encoded.payload, encoded.payload}, encoded.residual);
      EXPECT_EQ(reduced.status[0].flags, kTileNonFinite);
      EXPECT_EQ(reduced.status[2].flags, 0u);
      const Result decoded = run.decode(isa, reduced.payload, reduced.residual, Stage::kOwner);
      EXPECT_EQ(decoded.status[1].flags, kTileNonFinite);
      const std::vector<double> result = numbers(s.dtype, decoded.gradient);
      EXPECT_FALSE(std::isfinite(result[17]));
      EXPECT_FALSE(std::isfinite(result[4096 + 4095]));
      EXPECT_TRUE(std::isfinite(result[2 * 4096]));
      const Result undone =
          run.undo(isa, encoded.payload, reduced.payload, gradient, decoded.residual);
      for (const Buffer* residual :
           {&encoded.residual, &reduced.residual, &decoded.residual, &undone.residual}) {
        for (const float x : residual->as<float>()) ASSERT_TRUE(std::isfinite(x));
      }
    }
  }
}

#if defined(__x86_64__)
TEST_P(CodecContract, CallersFlushToZeroChangesNothingAndComesBack) {
  CallSetup s = setup({4096, 100});
  s.alpha = 0.3f;
  s.beta = 0.5f;
  const Runner run(s);
  const size_t n = run.num_elements();
  std::vector<double> input = make_input(Input::kTiny, n, 81);
  for (size_t i = 0; i < n; i += 40) input[i] = 3e-38;
  const Buffer gradient = run.gradient_from(input);
  const Buffer residual = run.residual_from(make_residual(Input::kTiny, n, 82));
  std::vector<double> lost(n, 0.0);
  for (size_t i = 0; i < n; i += 7) lost[i] = double(NAN);
  const Buffer sent = run.encode(Isa::kScalar, run.gradient_from(lost), Buffer()).payload;
  const Buffer nothing = run.reduce(Isa::kScalar, {sent}, Buffer()).payload;
  for (const Isa isa : available_isas()) {
    const Buffer payload = run.encode(isa, gradient, residual).payload;
    const std::vector<Buffer> three = {payload, payload, payload};
    const Buffer reduced = run.reduce(isa, three, residual).payload;
    const auto all = [&] {
      return std::vector<Result>{
          run.encode(isa, gradient, residual), run.reduce(isa, three, residual),
          run.decode(isa, reduced, residual, Stage::kOwner),
          run.undo(isa, payload, nothing, gradient, residual), run.accumulate(isa, three, 3)};
    };
    const std::vector<Result> before = all();
    const uint32_t saved = _mm_getcsr();
    // Flush to zero, denormals are zero, round toward zero, all exceptions masked.
    const uint32_t hostile = 0x8040u | 0x6000u | 0x1f80u;
    _mm_setcsr(hostile);
    const std::vector<Result> under = all();
    const uint32_t after = _mm_getcsr();
    _mm_setcsr(saved);
    EXPECT_EQ(after, hostile);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_result(before[i], under[i])) << i;
  }
}
#endif

TEST_P(CodecContract, TakesEveryBitPatternOfSixteenBitGradients) {
  if (item_bytes(GetParam().dtype) != 2) GTEST_SKIP() << "only for 16-bit gradients";
  const CallSetup s = setup(std::vector<uint32_t>(16, 4096));
  const Runner run(s);
  Buffer gradient = run.new_gradient();
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint16_t pattern = static_cast<uint16_t>(i);
    std::memcpy(gradient.data() + 2 * i, &pattern, 2);
  }
  const Result scalar = run.encode(Isa::kScalar, gradient, Buffer());
  const Result back = run.decode(Isa::kScalar, scalar.payload, Buffer(), Stage::kWorker);
  for (const Isa isa : available_isas()) {
    EXPECT_TRUE(run.encode(isa, gradient, Buffer()).payload == scalar.payload);
    EXPECT_TRUE(run.decode(isa, scalar.payload, Buffer(), Stage::kWorker).gradient ==
                back.gradient);
  }
  if (run.codec(Isa::kScalar).lossy) return;
  for (uint32_t i = 0; i < 65536; ++i) {
    const double x = read_number(s.dtype, gradient.data() + 2 * i);
    uint16_t expected = static_cast<uint16_t>(i);
    if (std::isnan(x)) expected = s.dtype == ScalarType::kBFloat16 ? 0x7fc0 : 0x7e00;
    uint16_t found;
    std::memcpy(&found, back.gradient.data() + 2 * i, 2);
    ASSERT_EQ(found, expected);
  }
}

TEST_P(CodecContract, RandomBytesNeverCrashAndNeverPoisonAResidual) {
  CallSetup s = setup({4096, 33, 1023, 1});
  s.beta = 0.9f;
  const Runner run(s);
  const size_t n = run.num_elements();
  std::mt19937_64 random(5);
  const Buffer residual = run.residual_from(make_residual(Input::kGaussian, n, 92));
  Buffer payload = run.encode(Isa::kScalar, run.new_gradient(), Buffer()).payload;
  for (int round = 0; round < 10; ++round) {
    for (size_t i = 0; i < payload.size(); ++i) payload.data()[i] = std::byte(random() & 255);
    const Result expected = run.reduce(Isa::kScalar, {payload, payload}, residual);
    const Result decoded = run.decode(Isa::kScalar, payload, residual, Stage::kWorker);
    for (const Isa isa : available_isas()) {
      const Result r = run.reduce(isa, {payload, payload}, residual);
      ASSERT_TRUE(r.payload == expected.payload && same_status(r.status, expected.status));
      const Result d = run.decode(isa, payload, residual, Stage::kWorker);
      ASSERT_TRUE(d.gradient == decoded.gradient && same_status(d.status, decoded.status));
      for (const float x : r.residual.as<float>()) ASSERT_TRUE(std::isfinite(x));
      for (const float x : d.residual.as<float>()) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

TEST_P(CodecContract, EmptyBatchAndMissingStatusAreFine) {
  const Runner empty(setup({}));
  const CallSetup s = setup({100});
  const Runner run(s);
  const Buffer gradient = run.gradient_from(make_input(Input::kGaussian, 100, 1));
  for (const Isa isa : available_isas()) {
    empty.encode(isa, empty.new_gradient(), Buffer());
    empty.accumulate(isa, {Buffer()}, 1);
    Buffer payload(run.payload_bytes(100, Stage::kWorker));
    const TileBatch batch{
        run.tiles().data(), 1,      GetParam().dtype, Stage::kWorker, false, s.seed, s.step,
        &run.options(),     nullptr};
    run.codec(isa).encode(batch, gradient.data(), 1.0f, nullptr, nullptr, payload.data());
    EXPECT_TRUE(payload == run.encode(isa, gradient, Buffer()).payload);
    Buffer sum = run.new_gradient();
    const std::byte* const payloads[] = {payload.data()};
    run.codec(isa).accumulate(batch, payloads, 1, 1, sum.data());
    EXPECT_TRUE(sum == run.decode(isa, payload, Buffer(), Stage::kWorker).gradient);
  }
}

TEST_P(CodecContract, AllZeroTileIsHeldAndItsResidualKept) {
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

// In a held zero tile, and in a unit that is not finite, which is everywhere here, whatever the
// codec's unit is.
TEST_P(CodecContract, ResidualThatIsNotReplacedIsKeptInTheNewUnits) {
  for (const double number : {0.0, double(INFINITY)}) {
    for (const float gain : {0.5f, 2.0f}) {
      CallSetup s = setup({4096, 50, 1024, 7});
      s.hold_zero_tiles = true;
      s.gain = gain;
      const Runner run(s);
      const size_t n = run.num_elements();
      const Buffer gradient = run.gradient_from(std::vector<double>(n, number));
      const std::vector<float> old = residual_beyond(gain, n, 73);
      for (const Isa isa : available_isas()) {
        const Result encoded = run.encode(isa, gradient, run.residual_from(old));
        const std::vector<float> kept = encoded.residual.as<float>();
        const std::vector<float> owner_kept =
            run.reduce(isa, {encoded.payload, encoded.payload}, run.residual_from(old))
                .residual.as<float>();
        for (size_t i = 0; i < n; ++i) {
          ASSERT_EQ(float_bits(kept[i]), float_bits(kept_by(gain, old[i]))) << i;
          ASSERT_EQ(float_bits(owner_kept[i]), float_bits(kept_by(gain, old[i]))) << i;
        }
      }
    }
  }
}

TEST_P(CodecContract, ZeroTileSendsItsResidualInMomentumMode) {
  const Runner run(setup({4096}));
  const Buffer gradient = run.gradient_from(std::vector<double>(4096, 0.0));
  const std::vector<float> old(4096, 0.5f);
  const Result encoded = run.encode(active_isa(), gradient, run.residual_from(old));
  EXPECT_NE(encoded.payload.as<uint32_t>(), std::vector<uint32_t>(encoded.payload.size() / 4, 0));
}

INSTANTIATE_TEST_SUITE_P(AllCodecs, CodecContract, ::testing::ValuesIn(all_cases()), case_name);

}  // namespace
}  // namespace gradferry::testing
