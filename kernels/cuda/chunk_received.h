// A tile's payloads in the messages of all ranks, for the kernels that add them up.
#pragma once

#include "kernels/cuda/chunk_parts.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

// What of ReceivedMessages the sum of a tile needs.
struct Received {
  const Message* messages;
  uint32_t num_messages;
  const std::byte* buffer;
};

// Adds the tile's payloads to the checksums of the messages that hold them. Whether, in the view of
// this thread, all of them are zero. A warp takes every fourth message.
GRADFERRY_DEVICE bool sum_payloads(const Received& received, uint32_t payload_offset,
                                   uint32_t num_bytes, uint64_t* sums) {
  const uint32_t warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  uint32_t seen = 0;
  for (uint32_t rank = warp; rank < received.num_messages; rank += kTileThreads / kWarpLanes) {
    const std::byte* payloads = received.buffer + received.messages[rank].offset + kHeaderBytes;
    const PayloadPart part =
        sum_words(payloads + payload_offset, num_bytes, payload_offset, 16 * lane, 16 * kWarpLanes);
    seen |= part.seen;
    const uint64_t sum = warp_sum(part.sum);
    if (lane == 0) add_to(sums + rank, sum);
  }
  return seen == 0;
}

// The payload's format does not depend on the dtype, except that of `exact`.
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

GRADFERRY_DEVICE const std::byte* payloads_of(const Received& received, uint32_t rank) {
  return received.buffer + received.messages[rank].offset + kHeaderBytes;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
