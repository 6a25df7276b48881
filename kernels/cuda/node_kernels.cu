// What ranks of one node do to a chunk before it is encoded: each gives its siblings the gradients
// of the tiles that they sum, and sums its own. A block per piece, of a tile's elements at most;
// memory is what limits both. hooks/host/chunk_codecs.cpp does the same on hosts, to the bit.
#include "kernels/cuda/message_headers.h"
#include "kernels/cuda/quads.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {
namespace {

constexpr uint32_t kThreads = kTileThreads;

// --- pack ----------------------------------------------------------------------------------------

// Items are moved, never looked at. Messages have them where 16 bytes are aligned; a bucket may
// not.
template <typename Item>
GRADFERRY_DEVICE void copy_items(const std::byte* from, uint32_t n, std::byte* to) {
  constexpr uint32_t kWide = sizeof(Bytes16), kItem = sizeof(Item);
  const bool is_aligned = reinterpret_cast<uintptr_t>(from) % kWide == 0;
  const uint32_t wide_bytes = is_aligned ? n * kItem / kWide * kWide : 0;
  for (uint32_t i = kWide * threadIdx.x; i < wide_bytes; i += kWide * kThreads) {
    write(to + i, read<Bytes16>(from + i));
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

// Whether a sibling's message has a wrong header.
GRADFERRY_DEVICE bool refuses_any(const SumCall& call) {
  bool refused = false;
  for (uint32_t m = threadIdx.x; m < call.num_messages; m += kThreads) {
    const Message message = call.messages[m];
    if (message.rank == call.envelope.rank) continue;
    refused |=
        judge(call.received + message.offset, call.envelope, message.rank, message.payload_bytes, 0)
            .status != WireStatus::kOk;
  }
  return __syncthreads_or(refused ? 1 : 0) != 0;
}

// Calls add(where the piece's items are, whether they are the first) for every sibling in turn.
template <typename Add>
GRADFERRY_DEVICE void for_siblings(const SumCall& call, const ChunkPiece& piece, uint32_t item,
                                   Add add) {
  for (uint32_t m = 0; m < call.num_messages; ++m) {
    const Message message = call.messages[m];
    const std::byte* items =
        message.rank == call.envelope.rank
            ? static_cast<const std::byte*>(call.gradient) + piece.gradient_offset * item
            : call.received + message.offset + kHeaderBytes + uint64_t{piece.offset} * item;
    add(items, m == 0);
  }
}

// Quads where their addresses allow it: always of what was received, maybe of the bucket.
template <ScalarType dtype>
GRADFERRY_DEVICE void sum_quad(const SumCall& call, const ChunkPiece& piece, uint32_t first,
                               std::byte* sum) {
  constexpr uint32_t kItem = item_bytes(dtype);
  const uint32_t rest = piece.num_elements - first;
  const auto factor = static_cast<float>(call.scale);
  float total[kQuad] = {};
  for_siblings(call, piece, kItem, [&](const std::byte* items, bool is_first) {
    const std::byte* p = items + first * kItem;
    float x[kQuad];
    widen_quad<dtype>(rest >= kQuad && items_off_quads<dtype>(p) == 0
                          ? read<Quad<dtype>>(p)
                          : load_items<dtype>(p, 0, rest),
                      x);
    GRADFERRY_UNROLL
    for (uint32_t i = 0; i < kQuad; ++i) total[i] = is_first ? x[i] : total[i] + x[i];
  });
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kQuad; ++i) total[i] = canonical(total[i] * factor);
  const Quad<dtype> out = narrow_quad<dtype>(total, quad_arrives_finite<dtype>(total));
  std::byte* to = sum + (piece.offset + first) * kItem;
  if (rest >= kQuad) {
    write(to, out);
  } else {
    store_items<dtype>(to, out, 0, rest);
  }
}

GRADFERRY_DEVICE void sum_double(const SumCall& call, const ChunkPiece& piece, uint32_t i,
                                 double* sum) {
  double total = 0;
  for_siblings(call, piece, sizeof(double), [&](const std::byte* items, bool is_first) {
    const auto x = read<double>(items + i * sizeof(double));
    total = is_first ? x : total + x;
  });
  sum[piece.offset + i] = total * call.scale;
}

template <ScalarType dtype>
__global__ void __launch_bounds__(kThreads) sum_kernel(SumCall call) {
  const ChunkPiece piece = call.pieces[blockIdx.x];
  const bool refused = refuses_any(call);
  if constexpr (dtype == ScalarType::kFloat64) {
    auto* sum = static_cast<double*>(call.sum);
    for (uint32_t i = threadIdx.x; i < piece.num_elements; i += kThreads) {
      if (refused) {
        write(sum + piece.offset + i, uint64_t{0x7ff8000000000000});
      } else {
        sum_double(call, piece, i, sum);
      }
    }
  } else {
    constexpr uint32_t kItem = item_bytes(dtype);
    auto* sum = static_cast<std::byte*>(call.sum);
    if (refused) {
      for (uint32_t i = threadIdx.x; i < piece.num_elements; i += kThreads) {
        store_item<dtype>(sum + (piece.offset + i) * kItem, narrow<dtype>(from_bits(kNanBits)));
      }
      return;
    }
    for (uint32_t i = kQuad * threadIdx.x; i < piece.num_elements; i += kQuad * kThreads) {
      sum_quad<dtype>(call, piece, i, sum);
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
