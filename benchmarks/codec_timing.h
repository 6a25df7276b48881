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
  int rounds = 9;                              // (roof, case, roof) triples
  bool misaligned = false;                     // gradient one element off a cache line
};

struct CodecTimingRow {
  std::string operation;     // encode, encode_ef (error feedback), decode, reduce
  uint32_t world_size;       // reduce: payloads summed; else 1
  double bytes_per_element;  // read plus written
  double seconds;            // of a pass over all elements: the medians of its sections, summed
  double gigabytes_per_second;
  double roof_gigabytes_per_second;
  double ratio;  // roof's time over the case's, from section medians; 1: as fast as the roof
  double ratio_minimum;  // of whole triples
  double ratio_maximum;
  double ratio_of_best;  // fastest roof over fastest case: what is left when others use the machine
  uint64_t wrong;        // bytes and elements that failed validation; the case is timed only if 0
};

// Validates, then times. Throws Error(kConfig) for a codec, dtype or instruction set it cannot run.
std::vector<CodecTimingRow> time_codec(const CodecTimingOptions& options);

// GB/s (read plus written) of memcpy over arrays of this size.
double memcpy_gigabytes_per_second(size_t num_bytes, int rounds);

}  // namespace gradferry
