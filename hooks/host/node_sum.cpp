#include "host/node_sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cstring>
#include <utility>

namespace gradferry {
namespace {

template <typename Item, typename Number>
void add(const Item* x, uint32_t n, bool is_first, Number* total) {
  if (is_first) {
    for (uint32_t i = 0; i < n; ++i) total[i] = static_cast<Number>(x[i]);
  } else {
    for (uint32_t i = 0; i < n; ++i) total[i] += static_cast<Number>(x[i]);
  }
}

// Tile by tile, so that the total stays in the cache.
template <typename Item, typename Number>
void sum_pieces(const Rail& rail, const std::vector<const std::byte*>& gradients, const void* own,
                double scale, void* sum) {
  const auto* own_items = static_cast<const Item*>(own);
  const auto factor = static_cast<Number>(scale);
  std::array<Number, kTileElements> total;  // NOLINT(*-member-init): add() begins with all of it
  for (const Piece& piece : rail.pieces) {
    const uint32_t n = piece.num_elements;
    bool is_first = true;
    for (const std::byte* message : gradients) {
      add(message == nullptr ? own_items + piece.gradient_offset
                             : reinterpret_cast<const Item*>(message) + piece.offset,
          n, std::exchange(is_first, false), total.data());
    }
    Item* to = static_cast<Item*>(sum) + piece.offset;
    for (uint32_t i = 0; i < n; ++i) to[i] = static_cast<Item>(total[i] * factor);
  }
}

}  // namespace

void pack_rail(const ChunkPlan& plan, uint32_t rail, const void* gradient, std::byte* message) {
  const uint64_t item = item_bytes(plan.dtype);
  for (const Piece& piece : plan.rails[rail].pieces) {
    std::memcpy(message + piece.offset * item,
                static_cast<const std::byte*>(gradient) + piece.gradient_offset * item,
                piece.num_elements * item);
  }
}

void sum_rail(const ChunkPlan& plan, uint32_t rail, const std::vector<const std::byte*>& gradients,
              const void* own, double scale, void* sum) {
  const Rail& pieces = plan.rails[rail];
  switch (plan.dtype) {
    case ScalarType::kFloat32: return sum_pieces<float, float>(pieces, gradients, own, scale, sum);
    case ScalarType::kBFloat16:
      return sum_pieces<c10::BFloat16, float>(pieces, gradients, own, scale, sum);
    case ScalarType::kFloat16:
      return sum_pieces<c10::Half, float>(pieces, gradients, own, scale, sum);
    case ScalarType::kFloat64:
      return sum_pieces<double, double>(pieces, gradients, own, scale, sum);
  }
}

}  // namespace gradferry
