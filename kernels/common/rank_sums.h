// The sum over ranks of a unit's payloads, in rank order and in registers: blocks outside, ranks
// inside. A codec supplies a class Term, what one rank adds:
//
//   uint32_t find(const Unit&, const std::byte* payload)
//     Sets the term to the unit in a rank's payload. Returns kTile* flags.
//   template <class Sink>
//   static void sum(const Unit&, const Term* terms, uint32_t count, const float* start, Sink sink)
//     Calls sink(i, s) for every vector of the unit, s being the sum of `count` terms on top of
//     start[i] .. unless start is null. NaNs of a single term without start are canonical.
#pragma once

#include "kernels/common/sinks.h"
#include "kernels/common/unit_io.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

template <typename Term, typename Unit, typename Sink>
GRADFERRY_LANE uint32_t decode_term(const Unit& unit, const std::byte* payload, Sink sink) {
  Term term;
  const uint32_t flags = term.find(unit, payload);
  Term::sum(unit, &term, 1, nullptr, sink);
  return flags;
}

// `sum` of a codec, see tile_driver.h.
template <typename Term, typename Unit, typename Sink>
GRADFERRY_LANE uint32_t sum_terms(const Unit& unit, const std::byte* const* payload_by_rank,
                                  size_t offset, uint32_t num_ranks, float* scratch, Sink sink) {
  constexpr uint32_t kRanksAtOnce = 8;
  Term terms[kRanksAtOnce];
  uint32_t flags = 0;
  for (uint32_t first = 0;; first += kRanksAtOnce) {
    const uint32_t rest = num_ranks - first;
    const uint32_t count = rest < kRanksAtOnce ? rest : kRanksAtOnce;
    for (uint32_t i = 0; i < count; ++i) {
      flags |= terms[i].find(unit, payload_by_rank[first + i] + offset);
    }
    const float* start = first == 0 ? nullptr : scratch;
    if (count == rest) {
      Term::sum(unit, terms, count, start, sink);
      return flags;
    }
    Term::sum(unit, terms, count, start, StoreSink{scratch});
  }
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
