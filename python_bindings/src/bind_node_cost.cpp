// Time that a rank takes for the gradients of its node, as in the engine, for predictions of steps.
#include <algorithm>
#include <cstddef>
#include <vector>

#include "bindings.h"
#include "gradferry/wire.h"
#include "host/node_sum.h"
#include "measure/pass_times.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

struct NodeCost {
  double pack_per_element;
  double sum_per_element;  // of all ranks of the node
};

// Section by section, each of which is one column's tiles in a chunk, so that an interruption
// spoils one of them. Zeros take as long as other numbers.
NodeCost measure_node(ScalarType dtype, uint32_t num_ranks, size_t num_sections, int rounds) {
  ChunkPlan plan{};
  plan.dtype = dtype;
  plan.columns.resize(1);
  Column& column = plan.columns.front();
  for (uint32_t t = 0; t < kSectionTiles; ++t) {
    const uint32_t begin = t * kTileElements;
    column.pieces.push_back({begin, kTileElements, begin});
  }
  const size_t section_bytes = kSectionTiles * size_t{kTileElements} * item_bytes(dtype);
  const std::vector<std::byte> own(num_sections * section_bytes);
  std::vector<std::byte> packed(own.size()), sum(own.size());
  std::vector<std::vector<std::byte>> received(num_ranks - 1, std::vector<std::byte>(own.size()));
  constexpr double kScale = 0.75;
  std::vector<Pass> packs, sums;
  for (int round = 0; round <= rounds; ++round) {
    Sections pack_s, sum_s;
    for (size_t begin = 0; begin < own.size(); begin += section_bytes) {
      std::vector<const std::byte*> gradients(1, nullptr);
      for (const auto& each : received) gradients.push_back(each.data() + begin);
      const std::byte* gradient = own.data() + begin;
      pack_s.push_back(seconds_of([&] { pack_column(plan, 0, gradient, packed.data() + begin); }));
      sum_s.push_back(seconds_of(
          [&] { sum_column(plan, 0, gradients, gradient, kScale, sum.data() + begin); }));
    }
    if (round == 0) continue;  // touches new memory
    packs.push_back({pack_s});
    sums.push_back({sum_s});
  }
  const double elements = static_cast<double>(own.size()) / item_bytes(dtype);
  return {typical_seconds(packs, median) / elements, typical_seconds(sums, median) / elements};
}

py::dict node_cost(at::ScalarType dtype, uint32_t num_ranks, size_t num_elements, int rounds) {
  GRADFERRY_EXPECTS(num_ranks >= 1 && num_elements >= kTileElements && rounds >= 1, kConfig,
                    "the cost of a node needs a rank, a tile and a round at least");
  const NodeCost cost = [&] {
    const py::gil_scoped_release released;
    const size_t num_sections = num_elements / (kSectionTiles * kTileElements);
    return measure_node(to_scalar_type(dtype), num_ranks, std::max<size_t>(num_sections, 1),
                        rounds);
  }();
  return py::dict(py::arg("pack_per_element") = cost.pack_per_element,
                  py::arg("sum_per_element") = cost.sum_per_element);
}

}  // namespace

void bind_node_cost(py::module_& module) {
  module.def("node_cost", &node_cost, py::arg("dtype"), py::kw_only(), py::arg("num_ranks"),
             py::arg("num_elements"), py::arg("rounds"));
}

}  // namespace gradferry
