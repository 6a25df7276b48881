#include "host/tensor_memory.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "hash64.h"

namespace gradferry {
namespace {

// From the first byte of a tensor to behind its last one.
struct Span {
  const std::byte* begin;
  const std::byte* end;
  bool is_dense;
  size_t index;
};

Span span_of(const at::Tensor& tensor, size_t index) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()),
          tensor.is_non_overlapping_and_dense(), index};
}

// Whether a step in some dimension may end where smaller steps lead, too.
bool may_overlap_itself(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t d = 0; d < tensor.dim(); ++d) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::ranges::sort(dims);
  int64_t reach = 0;
  for (const auto& [stride, size] : dims) {
    if (size > 1 && stride <= reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

}  // namespace

std::optional<std::string> memory_shared(const std::vector<at::Tensor>& tensors,
                                         const Reducer::NamedTensors& named) {
  std::vector<Span> spans;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || tensors[i].numel() == 0) continue;
    if (may_overlap_itself(tensors[i])) {
      return "elements of '" + named[i].first +
             "' share memory (expand() and unfold() do so); pass a clone()";
    }
    spans.push_back(span_of(tensors[i], i));
  }
  std::ranges::sort(spans, {}, &Span::begin);
  // Those that are not dense may lie between each other, but not in a dense one.
  const Span *before = nullptr, *farthest = nullptr, *farthest_dense = nullptr;
  const auto reaches = [](const Span* one, const Span& span) {
    return one && span.begin < one->end;
  };
  for (const Span& span : spans) {
    const Span* other = span.is_dense ? farthest : farthest_dense;
    if (before && before->begin == span.begin) other = before;
    if (reaches(other, span)) {
      const auto [first, second] = std::minmax(other->index, span.index);
      return "'" + named[first].first + "' and '" + named[second].first +
             "' share memory, which would be averaged twice; leave one of them out";
    }
    const auto extend = [&](const Span*& one) {
      if (!one || span.end > one->end) one = &span;
    };
    before = &span;
    extend(farthest);
    if (span.is_dense) extend(farthest_dense);
  }
  return std::nullopt;
}

uint64_t sample_of(const at::Tensor& tensor) {
  constexpr int64_t kElements = 64;
  const auto element_bytes = static_cast<int64_t>(tensor.element_size());
  std::array<std::byte, kElements * sizeof(double)> sampled{};
  const auto* from = static_cast<const std::byte*>(tensor.const_data_ptr());
  const int64_t size = tensor.numel(), count = std::min(size, kElements);
  for (int64_t i = 0; i < count; ++i) {
    // An odd distance, so that they are not all of one column.
    int64_t rest = ((size / count - 1) | 1) * i, offset = 0;
    for (int64_t d = tensor.dim(); d-- > 0; rest /= tensor.size(d)) {
      offset += rest % tensor.size(d) * tensor.stride(d);
    }
    std::memcpy(sampled.data() + i * element_bytes, from + offset * element_bytes,
                static_cast<size_t>(element_bytes));
  }
  return hash64(sampled.data(), sampled.size());
}

}  // namespace gradferry
