#include <array>

#include "kernels/rht/rht_layout.h"

namespace gradferry {
namespace {

using GRADFERRY_KERNEL_NAMESPACE::rht::Options;

constexpr std::array<std::string_view, 3> kBitsChoices = {"4", "3", "2"};
constexpr std::array<OptionSpec, 1> kOptions = {{
    {.name = "bits",
     .default_value = "4",
     .help = "bits per element, besides a scale of 16 bits per 128 elements",
     .minimum = 2,
     .maximum = 4,
     .choices = kBitsChoices},
}};

CodecOptions parse(std::span<const std::string_view> values) {
  return CodecOptions::from(Options{static_cast<uint32_t>(values[0][0] - '0')});
}

}  // namespace

extern const CodecDescription rht_description;
const CodecDescription rht_description = {
    .name = "rht",
    .summary =
        "random Hadamard transform, Gaussian codebook, least-squares scale per 128 elements "
        "(EDEN, ICML 2022)",
    .lossy = true,
    .supports_float64 = false,
    .options = kOptions,
    .parse = &parse,
    .payload_bytes = &GRADFERRY_KERNEL_NAMESPACE::rht::payload_bytes,
    .seeded = true,
};

}  // namespace gradferry
