// Which instruction sets this build and this processor have, and which one is in use.
#include <cstdlib>
#include <string>
#include <vector>

#include "gradferry/codec.h"
#include "gradferry/error.h"

#if defined(GRADFERRY_X86_KERNELS)
#include <cpuid.h>
#endif

namespace gradferry {
namespace {

std::vector<Isa> find_available() {
  std::vector<Isa> found = {Isa::kScalar};
#if defined(GRADFERRY_X86_KERNELS)
  // __builtin_cpu_supports also asks whether the operating system saves the registers; clang's does
  // not know F16C.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && has_f16c) found.push_back(Isa::kAvx2);
  if (found.back() == Isa::kAvx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    found.push_back(Isa::kAvx512);
  }
#endif
  return found;
}

std::string names_of_available() {
  std::string names;
  for (const Isa isa : available_isas()) {
    names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  return names;
}

Isa choose() {
  const char* forced = std::getenv("GRADFERRY_ISA");
  if (forced == nullptr || *forced == '\0') return available_isas().back();
  for (const Isa isa : available_isas()) {
    if (isa_name(isa) == forced) return isa;
  }
  throw Error(ErrorKind::kConfig,
              "environment variable GRADFERRY_ISA is '" + std::string(forced) +
                  "', but this build on this processor can run only: " + names_of_available() +
                  ". Set it to one of these, or unset it to use the best one");
}

}  // namespace

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
    default: return "scalar";
  }
}

std::span<const Isa> available_isas() {
  static const std::vector<Isa> available = find_available();
  return available;
}

Isa active_isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace gradferry
