// What ranks of one node do to a chunk before it is encoded: each gives its siblings the gradients
// of the tiles that they sum, and sums its own. A block per piece, of a tile's elements at most;
// memory is what limits both, so that a thread has many loads on their way before it uses the
// first. hooks/host/chunk_codecs.cpp does the same on hosts, to the bit.
#include "kernels/cuda/message_headers.h"
#include "kernels/cuda/quads.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

constexpr uint32_t kThreads = 256;
// Loads of a thread on their way at once: of the largest piece in pack, of siblings in sum.
constexpr uint32_t kInFlight = 8;

// --- pack ----------------------------------------------------------------------------------------

// Items are moved, never looked at. Messages have them where 16 bytes are aligned; a bucket may
// not.
template <typename Item>
GRADFERRY_DEVICE void copy_items(const std::byte* from, uint32_t n, std::byte* to) {
  constexpr uint32_t kWide = sizeof(Bytes16), kItem = sizeof(Item);
  const bool is_aligned = reinterpret_cast<uintptr_t>(from) % kWide == 0;
  const uint32_t wide_bytes = is_aligned ? n * kItem / kWide * kWide : 0;
  static_assert(kInFlight * kThreads * kWide == kTileElements * sizeof(double));
  Bytes16 moved[kInFlight];
  const auto at = [](uint32_t i) { return kWide * (threadIdx.x + i * kThreads); };
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kInFlight; ++i) {
    if (at(i) < wide_bytes) moved[i] = read<Bytes16>(from + at(i));
  }
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kInFlight; ++i) {
    if (at(i) < wide_bytes) write(to + at(i), moved[i]);
  }
  for (uint32_t i = wide_bytes / kItem + threadIdx.x; i < n; i += kThreads) {
    write(to + i * kItem, read<Item>(from + i * kItem));
  }
}

// The first block also writes the headers; without pieces it is the only one.
template <typename Item>
__global__ void __launch_bounds__(kThreads) pack_kernel(PackCall call) {
  if (blockIdx.x == 0) {
    for (uint32_t m = threadIdx.x; m < call.num_messages; m += kThreads) {
      const Message message = call.messages[m];
      write_header(call.out + message.offset, make_header(call.envelope, message.payload_bytes, 0));
    }
  }
  if (blockIdx.x >= call.num_pieces) return;
  const ChunkPiece piece = call.pieces[blockIdx.x];
  copy_items<Item>(
      static_cast<const std::byte*>(call.gradient) + piece.gradient_offset * sizeof(Item),
      piece.num_elements,
      call.out + call.messages[piece.message].offset + kHeaderBytes + piece.offset * sizeof(Item));
}

// --- sum -----------------------------------------------------------------------------------------

// Whether a sibling's message that this thread judges has a wrong header.
GRADFERRY_DEVICE bool refuses_any(const SumCall& call) {
  bool refused = false;
  for (uint32_t m = threadIdx.x; m < call.num_messages; m += kThreads) {
    const Message message = call.messages[m];
    if (message.rank == call.envelope.rank) continue;
    refused |=
        judge(call.received + message.offset, call.envelope, message.rank, message.payload_bytes, 0)
            .status != WireStatus::kOk;
  }
  return refused;
}

// Calls add(what load(its items) gave, whether it is the first) for every sibling in turn.
template <typename Load, typename Add>
GRADFERRY_DEVICE void for_siblings(const SumCall& call, const ChunkPiece& piece, uint32_t item,
                                   Load load, Add add) {
  const auto* own = static_cast<const std::byte*>(call.gradient) + piece.gradient_offset * item;
  const std::byte* received = call.received + kHeaderBytes + uint64_t{piece.offset} * item;
  for (uint32_t begin = 0; begin < call.num_messages; begin += kInFlight) {
    const uint32_t left = call.num_messages - begin;
    const std::byte* items[kInFlight];
    decltype(load(own)) loaded[kInFlight];
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kInFlight; ++i) {
      const Message message = call.messages[begin + (i < left ? i : 0)];
      items[i] = message.rank == call.envelope.rank ? own : received + message.offset;
    }
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (i < left) loaded[i] = load(items[i]);
    }
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (i < left) add(loaded[i], begin + i == 0);
    }
  }
}

// `sum` is the piece's. Quads where addresses allow it: always of what was received, maybe of the
// bucket.
template <ScalarType dtype>
GRADFERRY_DEVICE void sum_quad(const SumCall& call, const ChunkPiece& piece, uint32_t first,
                               std::byte* sum) {
  constexpr uint32_t kItem = item_bytes(dtype);
  const uint32_t rest = piece.num_elements - first;
  const auto factor = static_cast<float>(call.scale);
  float total[kQuad] = {};
  const auto load = [&](const std::byte* items) {
    const std::byte* p = items + first * kItem;
    return rest >= kQuad && items_off_quads<dtype>(p) == 0 ? read<Quad<dtype>>(p)
                                                           : load_items<dtype>(p, 0, rest);
  };
  for_siblings(call, piece, kItem, load, [&](const Quad<dtype>& quad, bool is_first) {
    float x[kQuad];
    widen_quad<dtype>(quad, x);
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) total[i] = is_first ? x[i] : total[i] + x[i];
  });
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kQuad; ++i) total[i] = canonical(total[i] * factor);
  const Quad<dtype> out = narrow_quad<dtype>(total, quad_arrives_finite<dtype>(total));
  std::byte* to = sum + first * kItem;
  if (rest >= kQuad) {
    write(to, out);
  } else {
    store_items<dtype>(to, out, 0, rest);
  }
}

GRADFERRY_DEVICE void sum_double(const SumCall& call, const ChunkPiece& piece, uint32_t i,
                                 std::byte* sum) {
  double total = 0;
  const auto load = [&](const std::byte* items) {
    return read<double>(items + i * sizeof(double));
  };
  for_siblings(call, piece, sizeof(double), load,
               [&](double x, bool is_first) { total = is_first ? x : total + x; });
  write(sum + i * sizeof(double), total * call.scale);
}

template <ScalarType dtype>
__global__ void __launch_bounds__(kThreads) sum_kernel(SumCall call) {
  constexpr bool kIsDouble = dtype == ScalarType::kFloat64;
  constexpr uint32_t kStep = kIsDouble ? 1 : kQuad;
  const ChunkPiece piece = call.pieces[blockIdx.x];
  auto* sum = static_cast<std::byte*>(call.sum) + piece.offset * item_bytes(dtype);
  for (uint32_t i = kStep * threadIdx.x; i < piece.num_elements; i += kStep * kThreads) {
    if constexpr (kIsDouble) {
      sum_double(call, piece, i, sum);
    } else {
      sum_quad<dtype>(call, piece, i, sum);
    }
  }
  // Last: nothing waits for the headers before it adds.
  if (__syncthreads_or(refuses_any(call) ? 1 : 0) == 0) return;
  for (uint32_t i = threadIdx.x; i < piece.num_elements; i += kThreads) {
    if constexpr (kIsDouble) {
      write(sum + i * sizeof(double), uint64_t{0x7ff8000000000000});
    } else {
      store_item<dtype>(sum + i * item_bytes(dtype), narrow<dtype>(from_bits(kNanBits)));
    }
  }
}

// --- launchers -----------------------------------------------------------------------------------

template <typename Item>
void launch_pack(const PackCall& call) {
  launch<pack_kernel<Item>>(call.num_pieces == 0 ? 1 : call.num_pieces, kThreads, call.stream,
                            call);
}

void pack(const PackCall& call) {
  switch (item_bytes(call.dtype)) {
    case 2: return launch_pack<uint16_t>(call);
    case 4: return launch_pack<uint32_t>(call);
    default: return launch_pack<uint64_t>(call);
  }
}

template <ScalarType dtype>
void launch_sum(const SumCall& call) {
  launch<sum_kernel<dtype>>(call.num_pieces, kThreads, call.stream, call);
}

void sum(const SumCall& call) {
  switch (call.dtype) {
    case ScalarType::kFloat32: return launch_sum<ScalarType::kFloat32>(call);
    case ScalarType::kBFloat16: return launch_sum<ScalarType::kBFloat16>(call);
    case ScalarType::kFloat16: return launch_sum<ScalarType::kFloat16>(call);
    case ScalarType::kFloat64: return launch_sum<ScalarType::kFloat64>(call);
  }
}

}  // namespace

extern const NodeKernels node_kernels;
const NodeKernels node_kernels{&pack, &sum};

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
