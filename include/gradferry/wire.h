// What travels between ranks: message headers and checksums. Defined in docs/wire_format.md.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace gradferry {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

inline constexpr uint32_t kWireMagic = 0x59524647;  // "GFRY"
inline constexpr uint16_t kWireVersion = 1;

enum class Phase : uint16_t {
  kScatter = 1,
  kGather = 2,
  kCommit = 3,
  kTensor = 4,
  kParameters = 5
};

// Why a rank is in trouble; 0 in every message of a healthy rank.
enum class WireStatus : uint32_t {
  kOk = 0,
  kBadMagic = 1,
  kBadVersion = 2,
  kBadPhase = 3,
  kBadSource = 4,
  kBadConfig = 5,
  kBadLayout = 6,
  kBadStep = 7,
  kBadChunk = 8,
  kBadPayloadBytes = 9,
  kBadChecksum = 10,
  kCorruptPayload = 11,
  kLocalFailure = 12,
  kPeerTrouble = 13,  // saw another rank's status; that rank's commit says why
};

// Precedes every payload.
struct MessageHeader {
  uint32_t magic;
  uint16_t wire_version;
  uint16_t phase;
  uint32_t status;
  uint32_t source_rank;
  uint64_t config_hash;
  uint64_t layout_hash;
  uint64_t step;
  uint64_t chunk;          // number of the chunk since attach; kParameters: of the next one
  uint32_t payload_bytes;  // without header and without padding after the last tile
  uint32_t checksum;
  uint64_t seed;  // Phase::kTensor: of the codec's random numbers; else 0
};
static_assert(sizeof(MessageHeader) == 64);

// Ends every bucket: one per rank, gathered by all. Carries the first error of its rank, with both
// values, so that every rank raises the same error.
struct CommitRecord {
  uint32_t magic;
  uint16_t wire_version;
  uint16_t phase;  // Phase::kCommit
  uint32_t status;
  uint32_t source_rank;
  uint64_t step;
  uint64_t bucket;        // number of the bucket since the codec was attached
  uint32_t failed_chunk;  // low 32 bits; 0 when status is kOk, as in all that follow
  uint16_t failed_phase;
  uint16_t failed_rank;  // whose message was refused, low 16 bits
  uint64_t expected;
  uint64_t received;
  uint32_t checksum;  // word_sum of the 14 words before it
  uint32_t reserved;  // 0
};
static_assert(sizeof(CommitRecord) == 64);

// Sum of word[i] * (2 i + 1) modulo 2^32: order-free, and sensitive to every single bit.
inline uint32_t word_sum(const std::byte* data, size_t num_bytes) {
  uint32_t sum = 0;
  for (size_t i = 0; i < num_bytes / 4; ++i) {
    uint32_t word;
    __builtin_memcpy(&word, data + 4 * i, 4);
    sum += word * static_cast<uint32_t>(2 * i + 1);
  }
  return sum;
}

// Adds a tile's word_sum to its message's checksum; `position` counts the message's tiles from 0.
inline uint32_t combine_checksum(uint32_t message, uint32_t tile, uint32_t position) {
  return message + tile * (2 * position + 1);
}

}  // namespace gradferry
