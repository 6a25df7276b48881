// Times the functions of a codec on one core against a roof: the fastest of several plain loops
// with the same read and write streams and no arithmetic to speak of, in the same run.
#pragma once

#include <string>
#include <vector>

#include "gradferry/codec.h"

namespace gradferry {

struct CodecTimingOptions {
  std::string codec = "q4";
  ScalarType dtype = ScalarType::kFloat32;
  Isa isa = Isa::kScalar;
  size_t num_elements = size_t{1} << 24;       // 64 MB of fp32: arrays must not fit the caches
  std::vector<uint32_t> world_sizes = {2, 8};  // one `reduce` row each
  int rounds = 9;                              // (roof, case, roof) triples; medians are reported
  bool misaligned = false;                     // gradient one element off a cache line
};

struct CodecTimingRow {
  std::string operation;     // encode, encode_ef (error feedback), decode, reduce
  uint32_t world_size;       // reduce: payloads summed; else 1
  double bytes_per_element;  // read plus written
  double seconds;            // median
  double gigabytes_per_second;
  double roof_gigabytes_per_second;
  double ratio;  // roof's time over the case's, median of the triples; 1: as fast as the roof
  double ratio_minimum;
  double ratio_maximum;
  uint64_t wrong;  // bytes and elements that failed validation; the case is timed only if 0
};

// Validates, then times. Throws Error(kConfig) for a codec, dtype or instruction set it cannot run.
std::vector<CodecTimingRow> time_codec(const CodecTimingOptions& options);

// GB/s (read plus written) of memcpy over arrays of this size.
double memcpy_gigabytes_per_second(size_t num_bytes, int rounds);

}  // namespace gradferry
