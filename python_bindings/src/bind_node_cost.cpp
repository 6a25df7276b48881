// Time that a rank takes for the gradients of its node, as in the engine, for predictions of steps.
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

// One column whose tiles are the whole bucket. Zeros take as long as other numbers.
NodeCost measure_node(ScalarType dtype, uint32_t num_ranks, uint32_t num_tiles, int rounds) {
  ChunkPlan plan{};
  plan.dtype = dtype;
  plan.columns.resize(1);
  Column& column = plan.columns.front();
  for (uint32_t t = 0; t < num_tiles; ++t) {
    const uint32_t begin = t * kTileElements;
    column.pieces.push_back({begin, kTileElements, begin});
  }
  column.num_elements = num_tiles * kTileElements;
  const size_t num_bytes = size_t{column.num_elements} * item_bytes(dtype);
  const std::vector<std::byte> own(num_bytes);
  std::vector<std::byte> packed(num_bytes), sum(num_bytes);
  std::vector<std::vector<std::byte>> received(num_ranks - 1, std::vector<std::byte>(num_bytes));
  std::vector<const std::byte*> gradients(num_ranks, nullptr);
  for (uint32_t i = 1; i < num_ranks; ++i) gradients[i] = received[i - 1].data();
  constexpr double kScale = 0.75;  // not 1, which would be left out
  std::vector<double> packs, sums;
  for (int round = 0; round <= rounds; ++round) {
    packs.push_back(seconds_of([&] { pack_column(plan, 0, own.data(), packed.data()); }));
    sums.push_back(
        seconds_of([&] { sum_column(plan, 0, gradients, own.data(), kScale, sum.data()); }));
  }
  const double elements = column.num_elements;
  // The first round touches new memory.
  return {median({packs.begin() + 1, packs.end()}) / elements,
          median({sums.begin() + 1, sums.end()}) / elements};
}

py::dict node_cost(at::ScalarType dtype, uint32_t num_ranks, size_t num_elements, int rounds) {
  GRADFERRY_EXPECTS(num_ranks >= 1 && num_elements >= kTileElements && rounds >= 1, kConfig,
                    "the cost of a node needs a rank, a tile and a round at least");
  const NodeCost cost = [&] {
    const py::gil_scoped_release released;
    const auto num_tiles = static_cast<uint32_t>(num_elements / kTileElements);
    return measure_node(to_scalar_type(dtype), num_ranks, num_tiles, rounds);
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
