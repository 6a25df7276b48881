// Codec strings: name[:option=value[,option=value]...]
#include "kernels/parse_codec.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "gradferry/error.h"

namespace gradferry {
namespace {

std::string quoted(std::string_view text) { return std::string("'").append(text).append("'"); }

std::string joined(std::span<const std::string_view> names) {
  std::string result;
  for (const std::string_view name : names) {
    if (!result.empty()) result += ", ";
    result += name;
  }
  return result;
}

// Insertions, deletions and replacements that turn a into b.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

// " Did you mean 'x'?" if a name is similar, else an empty string.
std::string suggestion(std::string_view text, std::span<const std::string_view> names) {
  std::string_view best;
  size_t best_distance = std::max<size_t>(1, text.size() / 2) + 1;
  for (const std::string_view name : names) {
    const size_t distance = edit_distance(text, name);
    if (distance < best_distance) {
      best_distance = distance;
      best = name;
    }
  }
  return best.empty() ? "" : " Did you mean " + quoted(best) + "?";
}

[[noreturn]] void fail(std::string_view text, const std::string& what) {
  throw Error(ErrorKind::kConfig, "codec " + quoted(text) + ": " + what);
}

std::string shortest_number(double value) {
  char buffer[32];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), value);
  (void)error;  // the longest double has 24 characters
  return {buffer, end};
}

std::optional<double> number_in(std::string_view value) {
  double number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size()) return {};
  return number;
}

// " Did you mean 'option=value'?" for a value without its option's name, else an empty string.
std::string option_suggestion(std::string_view value, const Codec& codec) {
  for (const OptionSpec& spec : codec.options) {
    const std::optional<double> number = number_in(value);
    const bool fits =
        spec.choices.empty()
            ? number && *number >= spec.minimum && *number <= spec.maximum
            : std::find(spec.choices.begin(), spec.choices.end(), value) != spec.choices.end();
    if (fits) {
      return " Did you mean " + quoted(std::string(spec.name) + "=" + std::string(value)) + "?";
    }
  }
  return "";
}

// Checks a value against its spec and returns it in canonical spelling.
std::string checked_value(std::string_view text, const OptionSpec& spec, std::string_view value) {
  if (!spec.choices.empty()) {
    if (std::find(spec.choices.begin(), spec.choices.end(), value) == spec.choices.end()) {
      fail(text, "option " + quoted(spec.name) + " cannot be " + quoted(value) + "; use one of: " +
                     joined(spec.choices) + "." + suggestion(value, spec.choices));
    }
    return std::string(value);
  }
  const std::optional<double> number = number_in(value);
  const std::string range =
      "a number from " + shortest_number(spec.minimum) + " to " + shortest_number(spec.maximum);
  if (!number || !std::isfinite(*number)) {
    fail(text, "option " + quoted(spec.name) + " is " + quoted(value) + ", which is not " + range);
  }
  if (*number < spec.minimum || *number > spec.maximum) {
    fail(text, "option " + quoted(spec.name) + " is " + quoted(value) + "; use " + range);
  }
  return shortest_number(*number);
}

const Codec& find_codec(std::string_view text, std::string_view name,
                        std::span<const Codec> table) {
  std::vector<std::string_view> names;
  for (const Codec& codec : table) {
    if (codec.name == name) return codec;
    names.push_back(codec.name);
  }
  fail(text, "there is no codec " + quoted(name) + "." + suggestion(name, names) +
                 " Codecs: " + joined(names));
}

size_t find_option(std::string_view text, std::string_view name, const Codec& codec) {
  std::vector<std::string_view> names;
  for (size_t i = 0; i < codec.options.size(); ++i) {
    if (codec.options[i].name == name) return i;
    names.push_back(codec.options[i].name);
  }
  fail(text, quoted(codec.name) + " has no option " + quoted(name) + "." + suggestion(name, names) +
                 " Options: " + joined(names));
}

// Fills `values`, in table order, from "option=value,option=value".
void read_options(std::string_view text, std::string_view list, const Codec& codec,
                  std::vector<std::string>& values) {
  if (codec.options.empty()) {
    fail(text, quoted(codec.name) + " has no options, so write just " + quoted(codec.name));
  }
  std::vector<bool> given(codec.options.size(), false);
  for (size_t begin = 0; begin <= list.size();) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    const std::string_view item = list.substr(begin, comma - begin);
    begin = comma + 1;
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos || equals == 0 || equals + 1 == item.size()) {
      fail(text,
           quoted(item) + " is not of the form option=value." + option_suggestion(item, codec));
    }
    const std::string_view name = item.substr(0, equals);
    const size_t index = find_option(text, name, codec);
    if (given[index]) fail(text, "option " + quoted(name) + " is given twice; keep one of them");
    given[index] = true;
    values[index] = checked_value(text, codec.options[index], item.substr(equals + 1));
  }
}

}  // namespace

ParsedCodec parse_codec_in(std::string_view text, std::span<const Codec> table) {
  const size_t colon = text.find(':');
  const Codec& codec = find_codec(text, text.substr(0, colon), table);
  std::vector<std::string> values;
  for (const OptionSpec& spec : codec.options) values.emplace_back(spec.default_value);
  if (colon != std::string_view::npos) read_options(text, text.substr(colon + 1), codec, values);

  ParsedCodec result{&codec, {}, std::string(codec.name)};
  char separator = ':';
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].empty()) continue;
    result.canonical += separator + std::string(codec.options[i].name) + "=" + values[i];
    separator = ',';
  }
  const std::vector<std::string_view> views(values.begin(), values.end());
  result.options = codec.parse(views);
  return result;
}

ParsedCodec parse_codec(std::string_view text) { return parse_codec_in(text, codecs()); }

}  // namespace gradferry
