// A tile's payloads in the messages of all ranks, for the kernels that add them up.
#pragma once

#include "kernels/cuda/chunk_parts.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// Calls f with the dtype of payloads. Their format does not depend on the gradient's, except that
// of `exact`.
template <typename Codec, typename F>
GRADFERRY_DEVICE void with_payload_dtype(ScalarType dtype, F f) {
  if constexpr (Codec::kUsesDtype) {
    switch (dtype) {
      case ScalarType::kBFloat16: return f.template operator()<ScalarType::kBFloat16>();
      case ScalarType::kFloat16: return f.template operator()<ScalarType::kFloat16>();
      default: break;
    }
  }
  f.template operator()<ScalarType::kFloat32>();
}

struct Inbox {
  const ReceivedMessages& received;
  uint64_t* sums;

  // Where the payloads of a rank's message begin.
  GRADFERRY_DEVICE const std::byte* operator()(uint32_t rank) const {
    return received.buffer + received.messages[rank].offset + kHeaderBytes;
  }
  // checksum: the thread's part, of a payload.
  GRADFERRY_DEVICE void note(uint32_t rank, uint64_t checksum) const {
    add_sum(sums, rank, checksum);
  }
};

// fp64: the checksums of the tile's payloads. Whether the thread has seen zeros alone.
GRADFERRY_DEVICE bool sum_float64(const Tile& tile, const Inbox& inbox) {
  uint32_t seen = 0;
  for (uint32_t rank = 0; rank < inbox.received.num_messages; ++rank) {
    PayloadSum sum(tile.payload_offset);
    add_payload(sum, inbox(rank) + tile.payload_offset,
                exact_float64::payload_bytes(tile.num_elements));
    inbox.note(rank, sum.checksum);
    seen |= sum.seen;
  }
  return seen == 0;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
