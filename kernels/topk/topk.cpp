#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "gradferry/error.h"
#include "kernels/topk/topk_layout.h"

namespace gradferry {
namespace {

using namespace GRADFERRY_KERNEL_NAMESPACE::topk;

constexpr std::string_view kValueChoices[] = {"bf16", "q4"};
constexpr OptionSpec kOptions[] = {
    {.name = "ratio",
     .default_value = "0.01",
     .help = "part of each tile that a rank sends",
     .minimum = 0.001,
     .maximum = 0.25,
     .choices = {}},
    {.name = "owner_ratio",
     .default_value = "",
     .help = "part of each tile that the owner sends back; at least ratio, by default 4 times that",
     .minimum = 0.001,
     .maximum = 0.25,
     .choices = {}},
    {.name = "values",
     .default_value = "bf16",
     .help = "format of the values: 16 bits, or 4 bits with a scale per 32",
     .minimum = 0,
     .maximum = 0,
     .choices = kValueChoices},
};

// `text` is a number that the parser has checked.
uint32_t millionths(std::string_view text) {
  double ratio = 0;
  std::from_chars(text.data(), text.data() + text.size(), ratio);
  return static_cast<uint32_t>(std::floor(ratio * kRatioOne + 0.5));
}

CodecOptions parse(std::span<const std::string_view> values) {
  Options options = {};
  options.ratio = millionths(values[0]);
  options.owner_ratio =
      values[1].empty() ? std::min(4 * options.ratio, kLargestRatio) : millionths(values[1]);
  options.q4_values = values[2] == "q4";
  GRADFERRY_EXPECTS(
      options.owner_ratio >= options.ratio, kConfig,
      "codec topk: owner_ratio is " + std::string(values[1]) + ", less than ratio, which is " +
          std::string(values[0]) +
          "; the owner's tile holds what several ranks chose: give it at least ratio, "
          "or leave owner_ratio out for 4 times ratio");
  return CodecOptions::from(options);
}

}  // namespace

extern const CodecDescription topk_description;
const CodecDescription topk_description = {
    .name = "topk",
    .summary =
        "the largest magnitudes of each tile and where they are (16 to 28 bits per kept one)",
    .lossy = true,
    .supports_float64 = false,
    .options = kOptions,
    .parse = &parse,
    .payload_bytes = &payload_bytes,
    .sent_share =
        [](const CodecOptions& options) {
          return static_cast<double>(options.as<Options>().ratio) / kRatioOne;
        },
};

}  // namespace gradferry
