#include "layout.h"

#include <algorithm>

#include "gradferry/error.h"

namespace gradferry {
namespace {

uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

Layout::Layout(const std::vector<ParameterSpec>& parameters, uint32_t rank, uint32_t world_size,
               Device device)
    : device_(device), world_size_(world_size) {
  GRADFERRY_EXPECTS(world_size >= 1 && world_size <= 65535, kConfig,
                    "world size " + std::to_string(world_size) + " is not in 1..65535");
  const ParsedCodec exact = parse_codec("exact", device);
  codecs_.push_back({exact.codec, exact.options});
  codec_names_.push_back(exact.canonical);
  shard_bytes_.assign(world_size, 0);
  std::vector<uint64_t> load(world_size, 0);

  for (const ParameterSpec& spec : parameters) {
    Parameter parameter{.name = spec.name,
                        .num_elements = spec.num_elements,
                        .dtype = spec.dtype,
                        .codec_index = add_codec(spec, spec.codec),
                        .warmup_index = add_codec(spec, spec.warmup),
                        .first_tile = num_tiles(),
                        .num_tiles = 0,
                        .worker_residual = kNoResidual,
                        .owner_residual = spec.owner_residual};
    const uint64_t tiles = (spec.num_elements + kTileElements - 1) / kTileElements;
    GRADFERRY_EXPECTS(tiles <= UINT32_MAX, kConfig,
                      "parameter '" + spec.name + "' has " + std::to_string(spec.num_elements) +
                          " elements, more than 2^44; split it");
    parameter.num_tiles = static_cast<uint32_t>(tiles);
    if (spec.worker_residual) {
      parameter.worker_residual = worker_residual_elements_;
      worker_residual_elements_ += round_up(spec.num_elements, kResidualAlignment);
    }
    for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
      const uint32_t n = tile_elements(parameter, t);
      const uint32_t worker = payload_bytes(parameter, n, Stage::kWorker, CodecChoice::kOwn);
      const uint32_t owned = payload_bytes(parameter, n, Stage::kOwner, CodecChoice::kOwn);
      const auto lightest = std::min_element(load.begin(), load.end());
      const auto owner = static_cast<uint16_t>(lightest - load.begin());
      *lightest += uint64_t{worker} + owned;
      const uint32_t largest = largest_payload_bytes(parameter, n);
      shard_bytes_[owner] += largest;
      largest_tile_bytes_ = std::max(largest_tile_bytes_, largest);
      owners_.push_back(owner);
      if (spec.owner_residual && owner == rank) {
        owner_residual_offsets_.push_back(owner_residual_elements_);
        owner_residual_elements_ += round_up(n, kResidualAlignment);
      } else {
        owner_residual_offsets_.push_back(kNoResidual);
      }
    }
    parameters_.push_back(std::move(parameter));
  }
}

uint32_t Layout::add_codec(const ParameterSpec& parameter, const std::string& codec) {
  const ParsedCodec parsed = parse_codec(codec, device_);
  GRADFERRY_EXPECTS(parameter.dtype != ScalarType::kFloat64 || parsed.codec->supports_float64,
                    kConfig,
                    "parameter '" + parameter.name + "' is float64, which codec '" +
                        parsed.canonical + "' does not take; use 'exact' for it");
  const auto found = std::find(codec_names_.begin(), codec_names_.end(), parsed.canonical);
  if (found != codec_names_.end()) return static_cast<uint32_t>(found - codec_names_.begin());
  codecs_.push_back({parsed.codec, parsed.options});
  codec_names_.push_back(parsed.canonical);
  return static_cast<uint32_t>(codecs_.size() - 1);
}

const Parameter& Layout::parameter_of(uint64_t tile) const {
  const auto after = std::upper_bound(
      parameters_.begin(), parameters_.end(), tile,
      [](uint64_t id, const Parameter& parameter) { return id < parameter.first_tile; });
  return *std::prev(after);
}

uint32_t Layout::tile_elements(const Parameter& parameter, uint32_t tile_in_parameter) const {
  const uint64_t start = uint64_t{tile_in_parameter} * kTileElements;
  return static_cast<uint32_t>(std::min<uint64_t>(kTileElements, parameter.num_elements - start));
}

ResidualRange Layout::owner_residual_range(const Parameter& parameter) const {
  ResidualRange range;
  for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
    const uint64_t offset = owner_residual_offset(parameter.first_tile + t);
    if (offset == kNoResidual) continue;
    if (range.end == 0) range.begin = offset;
    range.end = offset + tile_elements(parameter, t);
  }
  return range;
}

uint32_t Layout::codec_index(const Parameter& parameter, CodecChoice choice) {
  switch (choice) {
    case CodecChoice::kOwn: return parameter.codec_index;
    case CodecChoice::kWarmup: return parameter.warmup_index;
    default: return 0;
  }
}

uint32_t Layout::payload_bytes(const Parameter& parameter, uint32_t num_elements, Stage stage,
                               CodecChoice choice) const {
  const ResolvedCodec& used = codecs_[codec_index(parameter, choice)];
  return used.codec->payload_bytes(num_elements, parameter.dtype, stage, used.options);
}

uint32_t Layout::largest_payload_bytes(const Parameter& parameter, uint32_t num_elements) const {
  uint32_t largest = 0;
  for (const CodecChoice choice : {CodecChoice::kOwn, CodecChoice::kWarmup, CodecChoice::kExact}) {
    for (const Stage stage : {Stage::kWorker, Stage::kOwner}) {
      largest = std::max(largest, payload_bytes(parameter, num_elements, stage, choice));
    }
  }
  return largest;
}

uint64_t Layout::largest_shard_bytes() const {
  return *std::max_element(shard_bytes_.begin(), shard_bytes_.end());
}

}  // namespace gradferry
