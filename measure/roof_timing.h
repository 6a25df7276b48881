// Times the functions of a codec against a roof: the fastest of several plain loops with the same
// read and write streams and no arithmetic to speak of, in the same run, with as many threads.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradferry/codec.h"
#include "measure/pass_times.h"

namespace gradferry {

struct CodecTimingOptions {
  std::string codec = "q4";
  ScalarType dtype = ScalarType::kFloat32;
  Isa isa = Isa::kScalar;
  size_t num_elements = size_t{1} << 24;       // 64 MB of fp32: arrays must not fit the caches
  std::vector<uint32_t> world_sizes = {2, 8};  // one `reduce` row each
  int rounds = 9;                              // (roof, case, roof) triples
  uint32_t threads = 1;                        // each walks its own share of the tiles
  bool misaligned = false;                     // gradient one element off a cache line
};

struct CodecTimingRow {
  std::string operation;     // encode, encode_ef (error feedback), decode, reduce
  uint32_t world_size;       // reduce: payloads summed; else 1
  size_t num_elements;       // of the options, in whole tiles
  double bytes_per_element;  // read plus written
  double bits_per_element;   // of the payload read (decode, reduce) or written (encode)
  double nmse;               // |x - D(C(x))|^2 / |x|^2 of Gaussian fp32 numbers, no residual
  double seconds;            // of a pass over all elements: the medians of its sections, summed
  double gigabytes_per_second;
  double roof_gigabytes_per_second;
  RoundRatios ratios;    // roof's time over the case's; 1: as fast as the roof
  double ratio_of_best;  // fastest roof over fastest case: what is left when others use the machine
  double core_rate;      // multiply_adds_per_second() of the calling thread, median of the windows
  double best_core_rate;  // between the row's passes; and their largest
  uint64_t wrong;         // bytes that failed validation; the case is timed only if 0
};

// One codec on buffers of its own: Gaussian gradients and residuals, valid payloads.
class CodecTimer {
 public:
  // Throws Error(kConfig) for a codec, dtype, instruction set or size it cannot run.
  explicit CodecTimer(const CodecTimingOptions& options);
  ~CodecTimer();

  // Validates against the scalar kernels, then times every operation.
  std::vector<CodecTimingRow> rows();

  // Seconds of one pass of `encode_ef`, or of a `decode` of its payloads, over all elements: for a
  // caller that alternates it with something else.
  double encode_pass();
  double decode_pass();

  // What encode reads, as it lies in memory: num_elements of the dtype, whole tiles.
  std::span<std::byte> gradient();

 private:
  class Passes;
  std::unique_ptr<Passes> passes_;
};

// GB/s (read plus written) of memcpy over arrays of this size.
double memcpy_gigabytes_per_second(size_t num_bytes, int rounds);

}  // namespace gradferry
