// Headers, checksums and faults of messages, on a device: what hooks/protocol/messages.cpp does in
// host memory, to the bit.
#pragma once

#include <bit>

#include "gradferry/device_library.h"
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

// The sum over the warp, in all lanes: of 22, 22 and 20 bits, whose sums have 32 at most.
GRADFERRY_DEVICE uint64_t warp_sum(uint64_t x) {
  constexpr uint32_t kPart = (1u << 22) - 1;
  const uint32_t low = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(x) & kPart);
  const uint32_t middle = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(x >> 22) & kPart);
  const uint32_t high = __reduce_add_sync(kAllLanes, static_cast<uint32_t>(x >> 44));
  return low + (uint64_t{middle} << 22) + (uint64_t{high} << 44);
}

}  // namespace gradferry::GRADFERRY_KERNEL_NAMESPACE
