// Headers, checksums and faults of messages, on a device: what hooks/protocol/messages.cpp does in
// host memory, to the bit.
#pragma once

#include <bit>

#include "gradferry/device_library.h"
#include "kernels/cuda/block_collectives.h"
#include "kernels/cuda/slice.h"

namespace gradferry::GRADFERRY_KERNEL_NAMESPACE {

struct Fault {
  WireStatus status;
  Phase phase;
  uint32_t rank;
  uint64_t step;
  uint64_t chunk;
  uint64_t expected;
  uint64_t received;
};

// Only one thread of a kernel may call it, and only kernels of one stream.
GRADFERRY_DEVICE void note(Findings* findings, const Fault& fault) {
  const auto kept = static_cast<WireStatus>(findings->status);
  const bool echo = kept == WireStatus::kPeerTrouble && fault.status != WireStatus::kPeerTrouble;
  if (kept != WireStatus::kOk && !echo) return;
  findings->status = static_cast<uint32_t>(fault.status);
  findings->phase = static_cast<uint32_t>(fault.phase);
  findings->rank = fault.rank;
  findings->step = fault.step;
  findings->chunk = fault.chunk;
  findings->expected = fault.expected;
  findings->received = fault.received;
}

struct Minima {
  uint32_t of_warp[kTileThreads / kWarpLanes];
};
// The minimum over the block, valid in thread 0 only.
GRADFERRY_DEVICE uint32_t block_minimum(Minima& shared, uint32_t value) {
  const uint32_t least = __reduce_min_sync(kAllLanes, value);
  if (threadIdx.x % kWarpLanes == 0) shared.of_warp[threadIdx.x / kWarpLanes] = least;
  __syncthreads();
  uint32_t result = least;
  if (threadIdx.x == 0) {
    for (const uint32_t other : shared.of_warp) result = other < result ? other : result;
  }
  return result;
}

// The only unsigned 64-bit type of CUDA's atomicAdd.
GRADFERRY_DEVICE void add_to(uint64_t* sum, uint64_t value) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), value);
}

constexpr uint32_t kHeaderParts = sizeof(MessageHeader) / sizeof(Bytes16);
struct HeaderParts {
  Bytes16 part[kHeaderParts];
};

GRADFERRY_DEVICE void write_header(std::byte* message, const MessageHeader& header) {
  const auto parts = std::bit_cast<HeaderParts>(header);
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kHeaderParts; ++i) write(message + 16 * i, parts.part[i]);
}

// The first wrong field of a header; status kOk if there is none.
GRADFERRY_DEVICE Fault judge(const std::byte* message, Envelope envelope, uint32_t rank,
                             uint32_t payload_bytes, uint64_t checksum) {
  envelope.rank = rank;
  HeaderParts received;
  GRADFERRY_UNROLL
  for (uint32_t i = 0; i < kHeaderParts; ++i) received.part[i] = read<Bytes16>(message + 16 * i);
  const HeaderMismatch found = first_mismatch(make_header(envelope, payload_bytes, checksum),
                                              std::bit_cast<HeaderWords>(received));
  return {found.status,   envelope.phase, rank,          envelope.step,
          envelope.chunk, found.expected, found.received};
}

// The sum over the warp, in all lanes.
GRADFERRY_DEVICE uint64_t warp_sum(uint64_t x) {
  GRADFERRY_UNROLL
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

// Part of the word_sum() of a payload, those 16 bytes of it that begin at a multiple `first` of 16
// and then every `stride` bytes. `seen`: or of the words.
struct PayloadPart {
  uint64_t sum;
  uint32_t seen;
};
GRADFERRY_DEVICE PayloadPart sum_words(const std::byte* payload, uint32_t num_bytes,
                                       uint32_t message_offset, uint32_t first, uint32_t stride) {
  const uint32_t first_weight = message_offset / 2 + kFirstWeight;
  PayloadPart part{0, 0};
  for (uint32_t i = first; i < num_bytes; i += stride) {
    const Bytes16 words = read<Bytes16>(payload + i);
    GRADFERRY_UNROLL
    for (uint32_t j = 0; j < 4; ++j) {
      part.sum += uint64_t{words.word[j]} * (first_weight + 2 * (i / 4 + j));
      part.seen |= words.word[j];
    }
  }
  return part;
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
