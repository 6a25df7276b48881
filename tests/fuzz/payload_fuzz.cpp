// Payloads of peers, whatever their bytes: decode, reduce, accumulate and undo stay inside their
// buffers, give the same on every instruction set, find what the document calls corrupt, turn it
// into NaN, and leave residuals finite.
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/fuzz/codec_calls.h"
#include "tests/fuzz/corrupt_rules.h"

namespace gradferry::fuzzing {
namespace {

struct Call {
  CallSetup setup;
  Runner run;
  ParsedCodec codec;

  explicit Call(const CallSetup& described)
      : setup(described), run(described), codec(parse_codec(described.codec)) {}

  uint32_t offset(const Tile& tile, Stage stage) const {
    return stage == Stage::kOwner ? tile.output_offset : tile.payload_offset;
  }
};

// The input's own bytes, or what an encoder writes with some bytes changed.
Buffer take_payload(Bytes& input, const Call& call, Stage stage) {
  const bool own = input.flip();
  const Buffer gradient = own ? call.run.new_gradient() : take_gradient(input, call.run);
  Buffer payload = call.run.encode(Isa::kScalar, gradient, Buffer()).payload;
  if (stage == Stage::kOwner) {
    payload = call.run.reduce(Isa::kScalar, {payload}, Buffer()).payload;
  }
  if (own) {
    fill(input, payload.data(), payload.size());
  } else {
    input.damage(payload.data(), payload.size());
  }
  return payload;
}

// Flags and NaN are those of the document.
void check_verdict(const Call& call, const Buffer& payload, Stage stage, const Result& decoded) {
  const std::vector<double> numbers = testing::values(call.setup, payload, stage);
  const uint32_t item = item_bytes(call.setup.dtype);
  for (size_t t = 0; t < call.run.tiles().size(); ++t) {
    const Tile& tile = call.run.tiles()[t];
    bool finite = true;
    for (uint64_t i = tile.gradient_offset; i < tile.gradient_offset + tile.num_elements; ++i) {
      const std::byte* place = decoded.gradient.data() + i * item;
      const double number = testing::read_number(call.setup.dtype, place);
      finite = finite && std::isfinite(number);
      // Canonical if a NaN; and D rounded once.
      std::byte rounded[8];
      testing::write_number(call.setup.dtype, numbers[i], rounded);
      ASSERT_EQ(std::memcmp(rounded, place, item), 0) << "element " << i;
    }
    const bool corrupt = (decoded.status[t].flags & kTileCorrupt) != 0;
    ASSERT_EQ((decoded.status[t].flags & kTileNonFinite) != 0, !finite) << "tile " << t;
    ASSERT_TRUE(!corrupt || !finite) << "tile " << t;
    const std::optional<Verdict> verdict =
        verdict_on(call.codec, payload.data() + call.offset(tile, stage), tile.num_elements, stage);
    if (!verdict) {
      ASSERT_FALSE(corrupt);
      continue;
    }
    ASSERT_TRUE(corrupt || !verdict->corrupt) << "tile " << t;
    ASSERT_TRUE(!corrupt || verdict->corrupt || !verdict->complete) << "tile " << t;
    for (uint32_t i = 0; i < tile.num_elements; ++i) {
      const double number = numbers[tile.gradient_offset + i];
      ASSERT_FALSE(std::isinf(number)) << "element " << i;
      ASSERT_TRUE(std::isnan(number) || !verdict->nan[i]) << "element " << i;
      ASSERT_TRUE(!std::isnan(number) || verdict->nan[i] || !verdict->complete) << "element " << i;
    }
  }
}

Result check_decode(const Call& call, const Buffer& payload, const Buffer& residual, Stage stage) {
  Result decoded = call.run.decode(Isa::kScalar, payload, residual, stage);
  for (const Isa isa : available_isas()) {
    const Result other = call.run.decode(isa, payload, residual, stage);
    EXPECT_TRUE(other.gradient == decoded.gradient) << isa_name(isa);
    EXPECT_TRUE(other.residual == decoded.residual) << isa_name(isa);
    expect_same_flags(other.status, decoded.status);
  }
  expect_finite(decoded.residual);
  check_verdict(call, payload, stage, decoded);
  return decoded;
}

uint32_t corrupt_flag(const std::vector<Result>& decoded, size_t tile) {
  uint32_t flags = 0;
  for (const Result& each : decoded) flags |= each.status[tile].flags & kTileCorrupt;
  return flags;
}

void check_accumulate(const Call& call, const std::vector<Buffer>& payloads,
                      const std::vector<Result>& decoded, uint32_t divisor) {
  const Result sum = call.run.accumulate(Isa::kScalar, payloads, divisor);
  for (const Isa isa : available_isas()) {
    const Result other = call.run.accumulate(isa, payloads, divisor);
    EXPECT_TRUE(other.gradient == sum.gradient) << isa_name(isa);
    expect_same_flags(other.status, sum.status);
  }
  for (size_t t = 0; t < sum.status.size(); ++t) {
    ASSERT_EQ(sum.status[t].flags & kTileCorrupt, corrupt_flag(decoded, t)) << "tile " << t;
  }
  const bool wide = call.setup.dtype == ScalarType::kFloat64;
  std::vector<double> total = testing::values(call.setup, payloads[0], Stage::kWorker);
  for (size_t r = 1; r < payloads.size(); ++r) {
    const std::vector<double> more = testing::values(call.setup, payloads[r], Stage::kWorker);
    for (size_t i = 0; i < total.size(); ++i) {
      total[i] =
          wide ? total[i] + more[i] : static_cast<float>(total[i]) + static_cast<float>(more[i]);
    }
  }
  const uint32_t item = item_bytes(call.setup.dtype);
  for (size_t i = 0; i < total.size(); ++i) {
    const double mean = wide ? total[i] * (1.0 / divisor)
                             : static_cast<float>(total[i]) * (1.0F / static_cast<float>(divisor));
    std::byte rounded[8];
    testing::write_number(call.setup.dtype, mean, rounded);
    ASSERT_EQ(std::memcmp(rounded, sum.gradient.data() + i * item, item), 0) << "element " << i;
  }
}

// What an owner sends on is well-formed, whatever it received.
Result check_reduce(const Call& call, const std::vector<Buffer>& payloads,
                    const std::vector<Result>& decoded, const Buffer& residual) {
  Result reduced = call.run.reduce(Isa::kScalar, payloads, residual);
  for (const Isa isa : available_isas()) {
    const Result other = call.run.reduce(isa, payloads, residual);
    EXPECT_TRUE(other.payload == reduced.payload) << isa_name(isa);
    EXPECT_TRUE(other.residual == reduced.residual) << isa_name(isa);
    expect_same_flags(other.status, reduced.status);
  }
  expect_finite(reduced.residual);
  const Result back = call.run.decode(Isa::kScalar, reduced.payload, Buffer(), Stage::kOwner);
  const std::vector<double> sent = testing::values(call.setup, reduced.payload, Stage::kOwner);
  for (size_t t = 0; t < back.status.size(); ++t) {
    EXPECT_EQ(back.status[t].flags & kTileCorrupt, 0) << "tile " << t;
    EXPECT_EQ(reduced.status[t].flags & kTileCorrupt, corrupt_flag(decoded, t)) << "tile " << t;
  }
  for (const Buffer& payload : payloads) {
    const std::vector<double> numbers = testing::values(call.setup, payload, Stage::kWorker);
    for (size_t i = 0; i < numbers.size(); ++i) {
      EXPECT_TRUE(!std::isnan(numbers[i]) || std::isnan(sent[i])) << "element " << i;
    }
  }
  return reduced;
}

void check_undo(const Call& call, const Buffer& own, const Buffer& in, const Buffer& gradient,
                const Buffer& residual) {
  const Result undone = call.run.undo(Isa::kScalar, own, in, gradient, residual);
  for (const Isa isa : available_isas()) {
    for (const bool with_status : {false, true}) {
      const Result other = call.run.undo(isa, own, in, gradient, residual, with_status);
      EXPECT_TRUE(other.residual == undone.residual) << isa_name(isa);
    }
  }
  expect_finite(undone.residual);
  const Buffer arrived = call.run.decode(Isa::kScalar, in, Buffer(), Stage::kOwner).gradient;
  const uint32_t item = item_bytes(call.setup.dtype);
  for (size_t i = 0; i < call.run.num_elements(); ++i) {
    if (!std::isfinite(testing::read_number(call.setup.dtype, arrived.data() + i * item))) continue;
    ASSERT_EQ(std::memcmp(undone.residual.data() + 4 * i, residual.data() + 4 * i, 4), 0) << i;
  }
}

}  // namespace

void run(Bytes input) {
  const Call call(take_setup(input));
  const uint32_t world_size = 1 + input.below(3), divisor = 1 + input.below(5);
  const Buffer residual = take_residual(input, call.run);
  std::vector<Buffer> payloads;
  std::vector<Result> decoded;
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    payloads.push_back(take_payload(input, call, Stage::kWorker));
    decoded.push_back(check_decode(call, payloads.back(), residual, Stage::kWorker));
  }
  check_accumulate(call, payloads, decoded, divisor);
  check_reduce(call, payloads, decoded, residual);
  const Result mean = check_reduce(call, payloads, decoded, Buffer());
  if (!call.codec.codec->lossy) {
    EXPECT_TRUE(call.run.accumulate(Isa::kScalar, payloads, world_size).gradient ==
                call.run.decode(Isa::kScalar, mean.payload, Buffer(), Stage::kOwner).gradient);
  }
  const Buffer in = take_payload(input, call, Stage::kOwner);
  check_decode(call, in, residual, Stage::kOwner);
  check_undo(call, payloads[0], in, take_gradient(input, call.run), residual);
}

}  // namespace gradferry::fuzzing
