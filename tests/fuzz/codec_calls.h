// A call of a codec as a fuzz target's input describes it.
#pragma once

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <string>
#include <vector>

#include "gradferry/codec.h"
#include "gradferry/error.h"
#include "tests/fuzz/target.h"
#include "tests/kernels/codec_laws.h"
#include "tests/kernels/inputs.h"
#include "tests/kernels/option_sets.h"

namespace gradferry::fuzzing {

using testing::Buffer;
using testing::CallSetup;
using testing::Laws;
using testing::Runner;

// A codec of the table with its defaults, or with one option anywhere in its range.
inline std::string take_codec(Bytes& input) {
  const std::span<const Codec> table = cpu_codecs(Isa::kScalar);
  const Codec& codec = table[input.below(table.size())];
  const std::string name(codec.name);
  if (codec.options.empty() || !input.flip()) return name;
  const OptionSpec& option = codec.options[input.below(codec.options.size())];
  std::string text = name + ":" + std::string(option.name) + "=";
  if (option.choices.empty()) {
    const double part = input.take<uint16_t>() / 65535.0;
    char number[32];
    const double value = option.minimum + part * (option.maximum - option.minimum);
    text.append(number, std::to_chars(number, number + sizeof(number), value).ptr);
  } else {
    text += option.choices[input.below(option.choices.size())];
  }
  try {
    parse_codec(text);
  } catch (const Error&) {
    return name;  // it contradicts the defaults of others
  }
  return text;
}

inline ScalarType take_dtype(Bytes& input, const std::string& codec) {
  const bool wide = parse_codec(codec).codec->supports_float64;
  return static_cast<ScalarType>(input.below(wide ? 4 : 3));
}

// Mostly short: longer tiles have more of the same.
inline uint32_t take_size(Bytes& input) {
  switch (input.below(8)) {
    case 0: return 1 + input.below(kTileElements);
    case 1: return kTileElements - input.below(40);
    default: return 1 + input.below(256);
  }
}

// Any number: usual ones more often.
inline float take_scalar(Bytes& input) {
  constexpr float kUsual[] = {1.0F, 0.5F, 0.1F, 0.9F, 0.0F, 2.0F, 65536.0F};
  const uint32_t choice = input.below(8);
  return choice < 7 ? kUsual[choice] : std::bit_cast<float>(input.take<uint32_t>());
}

inline CallSetup take_setup(Bytes& input) {
  CallSetup setup;
  setup.codec = take_codec(input);
  setup.dtype = take_dtype(input, setup.codec);
  for (uint32_t count = 1 + input.below(3); count > 0; --count) {
    setup.sizes.push_back(take_size(input));
  }
  setup.hold_zero_tiles = input.flip();
  setup.misaligned = input.flip();
  setup.alpha = take_scalar(input);
  setup.gain = take_scalar(input);
  setup.beta = take_scalar(input);
  setup.seed = input.take<uint16_t>();
  setup.step = input.take<uint16_t>();
  return setup;
}

// Fills a buffer with bytes of the input: the next ones, or a few over and over.
inline void fill(Bytes& input, std::byte* place, size_t num_bytes) {
  const size_t period = input.flip() ? 1 + input.below(256) : num_bytes;
  const size_t first = std::min(period, num_bytes);
  input.take(place, first);
  for (size_t i = first; i < num_bytes; ++i) place[i] = place[i - first];
}

inline Buffer take_gradient(Bytes& input, const Runner& run) {
  if (input.flip()) {
    const testing::Input kind = testing::kInputs[input.below(std::size(testing::kInputs))];
    return run.gradient_from(testing::make_input(kind, run.num_elements(), input.below(256)));
  }
  Buffer gradient = run.new_gradient();
  fill(input, gradient.data(), gradient.size());
  return gradient;
}

// Every number that a residual may hold: all that are finite.
inline Buffer take_residual(Bytes& input, const Runner& run) {
  std::vector<uint32_t> bits(run.num_elements());
  fill(input, reinterpret_cast<std::byte*>(bits.data()), bits.size() * sizeof(uint32_t));
  std::vector<float> residual(bits.size());
  for (size_t i = 0; i < bits.size(); ++i) {
    const float number = std::bit_cast<float>(bits[i]);
    residual[i] = std::isfinite(number) ? number : std::bit_cast<float>(bits[i] & 0x807fffffU);
  }
  return Runner::residual_from(residual);
}

}  // namespace gradferry::fuzzing
