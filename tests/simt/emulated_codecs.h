// The codecs of kernels/*/*_cuda.cu as the emulator runs them, in rows like those of the table.
#pragma once

#include "tests/cpp/codec_runner.h"

namespace gradferry::testing {

// Named as in the table; null when it has no CUDA source.
const Codec* find_emulated(std::string_view name);

// Runs the emulated codec, whatever instruction set is asked for.
class EmulatedRunner : public Runner {
 public:
  using Runner::Runner;
  const Codec& codec(Isa isa) const override { return *find_emulated(Runner::codec(isa).name); }
};

}  // namespace gradferry::testing
