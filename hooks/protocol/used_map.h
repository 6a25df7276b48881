// Which parameters of a bucket a rank used in a pass, as messages carry it (used_parameters.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradferry {

// One byte per parameter of a bucket, in bucket order: not 0 if it was used.
using UsedMap = std::vector<uint8_t>;

// Bytes of a map in a message: one for each parameter, and zeros up to a multiple of 8.
constexpr uint64_t used_map_bytes(size_t num_parameters) { return (num_parameters + 7) / 8 * 8; }

}  // namespace gradferry
