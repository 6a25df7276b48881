// The two halves of a row of the codec table. The description is compiled once
// (kernels/<codec>/<codec>.cpp), the functions once per instruction set
// (kernels/<codec>/<codec>_cpu.cpp).
#pragma once

#include "gradferry/codec.h"

namespace gradferry {

// See the members of Codec with the same names.
struct CodecDescription {
  std::string_view name;
  std::string_view summary;
  bool lossy;
  bool supports_float64;
  std::span<const OptionSpec> options;
  decltype(Codec::parse) parse;
  decltype(Codec::payload_bytes) payload_bytes;
  decltype(Codec::sent_share) sent_share = nullptr;
  bool seeded = false;
};

struct CodecFunctions {
  decltype(Codec::encode) encode;
  decltype(Codec::decode) decode;
  decltype(Codec::reduce) reduce;
  decltype(Codec::accumulate) accumulate;
  decltype(Codec::undo) undo;
};

constexpr uint32_t round_up(uint32_t value, uint32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Whether undo must process a tile.
inline bool holds_nonfinite(const TileBatch& batch, uint32_t index) {
  return batch.status == nullptr || (batch.status[index].flags & kTileNonFinite) != 0;
}

// The parse function of a codec without options.
inline CodecOptions parse_nothing(std::span<const std::string_view>) { return {}; }

}  // namespace gradferry
