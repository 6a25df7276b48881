// Instructions that every lane does for itself: the table of their names.
#pragma once

#include <string_view>

#include "tests/kernels/ptx/program.h"

namespace ptx {

struct Instruction {
  void (*run)(Context&, const Op&);
  uint8_t destination_bits;
  uint8_t num_sources;
  std::array<uint8_t, 4> source_bits;  // 1: a predicate
};
// By its full name, such as "add.rn.f32"; null if the machine does not know it.
const Instruction* find_instruction(std::string_view name);

}  // namespace ptx
