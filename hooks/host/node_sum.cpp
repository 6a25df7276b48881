#include "host/node_sum.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>

namespace gradferry {
namespace {

template <typename Item, typename Number>
void add(const Item* x, uint32_t n, bool is_first, Number* sum) {
  if (is_first) {
    for (uint32_t i = 0; i < n; ++i) sum[i] = static_cast<Number>(x[i]);
  } else {
    for (uint32_t i = 0; i < n; ++i) sum[i] += static_cast<Number>(x[i]);
  }
}

// Tile by tile, so that the sum stays in the cache.
template <typename Item, typename Number>
void sum_pieces(const Column& column, const std::vector<const std::byte*>& gradients,
                const void* own, double scale, Number* sum) {
  const auto factor = static_cast<Number>(scale);
  for (const Piece& piece : column.pieces) {
    Number* to = sum + piece.offset;
    bool is_first = true;
    for (const std::byte* message : gradients) {
      const auto* items = message == nullptr
                              ? static_cast<const Item*>(own) + piece.gradient_offset
                              : reinterpret_cast<const Item*>(message) + piece.offset;
      add(items, piece.num_elements, is_first, to);
      is_first = false;
    }
    if (factor == Number{1}) continue;
    for (uint32_t i = 0; i < piece.num_elements; ++i) to[i] *= factor;
  }
}

}  // namespace

void pack_column(const ChunkPlan& plan, uint32_t column, const void* gradient,
                 std::byte* message) {
  const uint64_t item = item_bytes(plan.dtype);
  for (const Piece& piece : plan.columns[column].pieces) {
    std::memcpy(message + piece.offset * item,
                static_cast<const std::byte*>(gradient) + piece.gradient_offset * item,
                piece.num_elements * item);
  }
}

void sum_column(const ChunkPlan& plan, uint32_t column,
                const std::vector<const std::byte*>& gradients, const void* own, double scale,
                void* sum) {
  const Column& pieces = plan.columns[column];
  switch (plan.dtype) {
    case ScalarType::kFloat32:
      return sum_pieces<float>(pieces, gradients, own, scale, static_cast<float*>(sum));
    case ScalarType::kBFloat16:
      return sum_pieces<c10::BFloat16>(pieces, gradients, own, scale, static_cast<float*>(sum));
    case ScalarType::kFloat16:
      return sum_pieces<c10::Half>(pieces, gradients, own, scale, static_cast<float*>(sum));
    case ScalarType::kFloat64:
      return sum_pieces<double>(pieces, gradients, own, scale, static_cast<double*>(sum));
  }
}

}  // namespace gradferry
