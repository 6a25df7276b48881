#include "protocol/defaults.h"

#include <algorithm>
#include <array>

#include "gradferry/codec.h"
#include "gradferry/error.h"

namespace gradferry {
namespace {

// From so many bits per element on, "auto" keeps no worker residual.
constexpr double kOwnerOnlyBits = 8.0;

// The bits that a worker sends for a full tile of fp32.
double bits_per_element(const ParsedCodec& parsed) {
  const uint32_t payload_bytes = parsed.codec->payload_bytes(kTileElements, ScalarType::kFloat32,
                                                             Stage::kWorker, parsed.options);
  return 8.0 * payload_bytes / kTileElements;
}

}  // namespace

KeptResiduals kept_residuals(std::string_view codec, const std::string& error_feedback,
                             double momentum) {
  constexpr std::array<std::string_view, 5> kWords{"auto", "none", "owner", "worker", "both"};
  GRADFERRY_EXPECTS(
      std::ranges::find(kWords, error_feedback) != kWords.end(), kConfig,
      "error_feedback='" + error_feedback + "' is none of auto, none, owner, worker, both");
  const ParsedCodec parsed = parse_codec(codec);
  bool worker = error_feedback == "worker" || error_feedback == "both";
  bool owner = error_feedback == "owner" || error_feedback == "both";
  if (error_feedback == "auto") {
    owner = true;
    worker = momentum != 0 || bits_per_element(parsed) < kOwnerOnlyBits;
  }
  return {.worker = momentum != 0 || (parsed.codec->lossy && worker),
          .owner = parsed.codec->lossy && owner};
}

}  // namespace gradferry
