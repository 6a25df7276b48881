#include "protocol/layout.h"

#include <algorithm>
#include <utility>

#include "gradferry/error.h"

namespace gradferry {

Layout::Layout(const std::vector<ParameterSpec>& parameters, uint32_t rank, Nodes nodes)
    : rank_(rank), nodes_(std::move(nodes)) {
  const uint32_t world_size = nodes_.world_size();
  std::vector<uint32_t> candidates;  // for ownership
  for (uint32_t r = 0; r < world_size; ++r) {
    if (nodes_.is_leader(r)) candidates.push_back(r);
  }
  const ParsedCodec exact = parse_codec("exact");
  codecs_.push_back({exact.codec, exact.options});
  codec_names_.push_back(exact.canonical);
  shard_bytes_.assign(world_size, 0);
  dense_bytes_.assign(nodes_.num_rails(), 0);
  std::vector<uint64_t> load(world_size, 0);
  const auto place = [](uint64_t& elements, uint32_t n) {
    return std::exchange(elements, elements + round_up(n, kResidualAlignment));
  };

  for (const ParameterSpec& spec : parameters) {
    Parameter parameter{.name = spec.name,
                        .num_elements = spec.num_elements,
                        .dtype = spec.dtype,
                        .codec_index = add_codec(spec, spec.codec),
                        .warmup_index = add_codec(spec, spec.warmup),
                        .first_tile = num_tiles(),
                        .num_tiles = 0,
                        .worker_residual = spec.worker_residual,
                        .owner_residual = spec.owner_residual};
    const uint64_t tiles = (spec.num_elements + kTileElements - 1) / kTileElements;
    GRADFERRY_EXPECTS(tiles <= UINT32_MAX, kConfig,
                      "parameter '" + spec.name + "' has " + std::to_string(spec.num_elements) +
                          " elements, more than 2^44; split it");
    GRADFERRY_EXPECTS(
        !spec.owner || (*spec.owner < world_size && nodes_.is_leader(*spec.owner)), kConfig,
        "parameter '" + spec.name + "' has owner " + std::to_string(spec.owner.value_or(0)) +
            ", which is none of " + std::to_string(world_size) + " ranks that own tiles");
    parameter.num_tiles = static_cast<uint32_t>(tiles);
    for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
      const uint32_t n = tile_elements(parameter, t);
      const uint32_t worker = payload_bytes(parameter, n, Stage::kWorker, CodecChoice::kOwn);
      const uint32_t owned = payload_bytes(parameter, n, Stage::kOwner, CodecChoice::kOwn);
      const uint32_t owner = spec.owner.value_or(
          *std::min_element(candidates.begin(), candidates.end(),
                            [&](uint32_t a, uint32_t b) { return load[a] < load[b]; }));
      load[owner] += uint64_t{worker} + owned;
      const uint32_t largest = largest_payload_bytes(parameter, n);
      shard_bytes_[owner] += largest;
      dense_bytes_[nodes_.local_index(owner)] +=
          round_up(n, kPieceAlignment) * item_bytes(parameter.dtype);
      largest_tile_bytes_ = std::max(largest_tile_bytes_, largest);
      owners_.push_back(static_cast<uint16_t>(owner));
      const bool is_leader = nodes_.local_index(owner) == nodes_.local_index(rank);
      worker_offsets_.push_back(
          spec.worker_residual && is_leader ? place(worker_residual_elements_, n) : kNoResidual);
      owner_offsets_.push_back(
          spec.owner_residual && owner == rank ? place(owner_residual_elements_, n) : kNoResidual);
    }
    parameters_.push_back(std::move(parameter));
  }
}

uint32_t Layout::add_codec(const ParameterSpec& parameter, const std::string& codec) {
  const ParsedCodec parsed = parse_codec(codec);
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

ResidualRange Layout::residual_range(const Parameter& parameter,
                                     const std::vector<uint64_t>& offsets) const {
  ResidualRange range;
  for (uint32_t t = 0; t < parameter.num_tiles; ++t) {
    const uint64_t offset = offsets[parameter.first_tile + t];
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

uint64_t Layout::largest_dense_bytes() const {
  return *std::max_element(dense_bytes_.begin(), dense_bytes_.end());
}

uint64_t Layout::largest_shard_bytes() const {
  return *std::max_element(shard_bytes_.begin(), shard_bytes_.end());
}

}  // namespace gradferry
