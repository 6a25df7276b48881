// The model as tiles: the codec, the owner and the offsets into the residuals of each tile.
// Built once when the codec is attached, before any bucket is known, and never changed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradferry/codec.h"
#include "protocol/nodes.h"

namespace gradferry {

constexpr uint64_t round_up(uint64_t number, uint64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

// One parameter that DDP reduces, as the caller describes it.
struct ParameterSpec {
  std::string name;
  uint64_t num_elements;  // of the real view: a complex parameter counts twice
  ScalarType dtype;       // of the real view
  std::string codec;      // a codec string, already resolved by the rules
  std::string warmup;     // the codec of warm-up steps
  bool worker_residual;   // keep the compression error of the first encode
  bool owner_residual;    // keep that of the owner's encode
  // The rank that reduces all of its tiles. None: the Layout spreads them over ranks.
  std::optional<uint32_t> owner = std::nullopt;
};

// The residuals of a world of one: a place for whatever residual a larger world has saved for the
// parameter, until the next gradient delivers it.
inline void place_alone(ParameterSpec& parameter) {
  parameter.worker_residual = true;
  parameter.owner_residual = false;
}

// A codec with its options.
struct ResolvedCodec {
  const Codec* codec;
  CodecOptions options;
};

// Which codec a parameter's tiles travel with.
enum class CodecChoice : uint8_t {
  kOwn,
  kWarmup,
  kExact,  // `exact`, whatever the parameter's is: where nothing is exchanged
};

inline constexpr uint64_t kNoResidual = ~uint64_t{0};
// Residuals of a tile start on a cache line: 16 fp32.
inline constexpr uint64_t kResidualAlignment = 16;
// Elements: so do tiles on their way to their leaders.
inline constexpr uint32_t kPieceAlignment = 16;

struct Parameter {
  std::string name;
  uint64_t num_elements;
  ScalarType dtype;
  uint32_t codec_index;   // into Layout::codecs()
  uint32_t warmup_index;  // likewise, of its codec in warm-up steps
  uint64_t first_tile;    // id of its first tile
  uint32_t num_tiles;
  bool worker_residual;
  bool owner_residual;
};

// Elements of a residual.
struct ResidualRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

class Layout {
 public:
  // Throws Error(kConfig) for an unknown codec, a codec that cannot take the parameter's dtype, or
  // an owner that is no leader.
  Layout(const std::vector<ParameterSpec>& parameters, uint32_t rank, Nodes nodes);

  uint32_t rank() const { return rank_; }
  const Nodes& nodes() const { return nodes_; }
  uint32_t world_size() const { return nodes_.world_size(); }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // Distinct codecs in use. Entry 0 is always `exact`.
  const std::vector<ResolvedCodec>& codecs() const { return codecs_; }
  uint64_t num_tiles() const { return owners_.size(); }

  // The rank that reduces the tile: that of the parameter, if it has one; else, in tile order, the
  // rank with the fewest payload bytes so far, of those that have a rail.
  uint32_t owner(uint64_t tile) const { return owners_[tile]; }
  uint32_t rail(uint64_t tile) const { return nodes_.local_index(owners_[tile]); }

  // Where the tile starts in this rank's residuals; kNoResidual when it has none here. Leaders
  // keep worker residuals, owners those of owners.
  uint64_t worker_residual_offset(uint64_t tile) const { return worker_offsets_[tile]; }
  uint64_t owner_residual_offset(uint64_t tile) const { return owner_offsets_[tile]; }
  // The worker residuals of a parameter's tiles here, which lie one after the other; empty: none.
  ResidualRange worker_residual_range(const Parameter& parameter) const {
    return residual_range(parameter, worker_offsets_);
  }
  ResidualRange owner_residual_range(const Parameter& parameter) const {
    return residual_range(parameter, owner_offsets_);
  }

  // The parameter that contains the tile.
  const Parameter& parameter_of(uint64_t tile) const;
  uint32_t tile_elements(const Parameter& parameter, uint32_t tile_in_parameter) const;
  // Into codecs().
  static uint32_t codec_index(const Parameter& parameter, CodecChoice choice);
  // Bytes of a tile's payload.
  uint32_t payload_bytes(const Parameter& parameter, uint32_t num_elements, Stage stage,
                         CodecChoice choice) const;

  uint64_t worker_residual_elements() const { return worker_residual_elements_; }
  uint64_t owner_residual_elements() const { return owner_residual_elements_; }

  // The most bytes any rank owns of the whole model, in the larger stage, with whichever codecs.
  uint64_t largest_shard_bytes() const;
  // The most bytes of gradient that a rail has of the whole model.
  uint64_t largest_dense_bytes() const;
  // The longest payload of a tile, likewise.
  uint32_t largest_tile_bytes() const { return largest_tile_bytes_; }

 private:
  uint32_t add_codec(const ParameterSpec& parameter, const std::string& codec);
  uint32_t largest_payload_bytes(const Parameter& parameter, uint32_t num_elements) const;
  ResidualRange residual_range(const Parameter& parameter,
                               const std::vector<uint64_t>& offsets) const;

  uint32_t rank_;
  Nodes nodes_;
  std::vector<Parameter> parameters_;
  std::vector<ResolvedCodec> codecs_;
  std::vector<std::string> codec_names_;  // canonical strings, parallel to codecs_
  std::vector<uint16_t> owners_;
  std::vector<uint64_t> worker_offsets_, owner_offsets_;  // by tile
  std::vector<uint64_t> shard_bytes_;                     // by rank
  std::vector<uint64_t> dense_bytes_;                     // by rail
  uint32_t largest_tile_bytes_ = 0;
  uint64_t worker_residual_elements_ = 0;
  uint64_t owner_residual_elements_ = 0;
};

}  // namespace gradferry
