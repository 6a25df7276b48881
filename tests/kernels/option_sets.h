// Codec strings that use every option of every codec, read off the codec table.
#pragma once

#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "gradferry/codec.h"
#include "gradferry/error.h"

namespace gradferry::testing {

inline std::vector<std::string> values_to_try(const OptionSpec& option) {
  if (!option.choices.empty()) return {option.choices.begin(), option.choices.end()};
  std::vector<std::string> values;
  for (const double number : {option.minimum, option.maximum}) {
    char text[32];
    values.emplace_back(text, std::to_chars(text, text + sizeof(text), number).ptr);
  }
  return values;
}

// The codec alone, then with one option at a time at each of its choices, or at its smallest and
// largest number. Left out: the defaults spelt out, and what the codec refuses beside its defaults.
inline std::vector<std::string> option_sets(const Codec& codec) {
  std::vector<std::string> sets = {std::string(codec.name)};
  for (const OptionSpec& option : codec.options) {
    for (const std::string& value : values_to_try(option)) {
      if (value == option.default_value) continue;
      // Not by parse_codec(), which would settle the instruction set before main() begins.
      std::vector<std::string_view> values;
      for (const OptionSpec& other : codec.options) {
        values.push_back(other.name == option.name ? std::string_view(value) : other.default_value);
      }
      bool fits = true;
      try {
        codec.parse(values);
      } catch (const Error&) {
        fits = false;
      }
      if (fits) sets.push_back(sets[0] + ":" + std::string(option.name) + "=" + value);
    }
  }
  return sets;
}

// Of all codecs.
inline std::vector<std::string> all_codecs() {
  std::vector<std::string> all;
  for (const Codec& codec : cpu_codecs(Isa::kScalar)) {
    for (const std::string& text : option_sets(codec)) all.push_back(text);
  }
  return all;
}

// A codec string as part of a name: letters, digits, and what else `allowed` holds.
inline std::string as_name(std::string text, std::string_view allowed) {
  for (char& c : text) {
    const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (!plain && allowed.find(c) == std::string_view::npos) c = '_';
  }
  return text;
}

}  // namespace gradferry::testing
