// What travels between ranks: message headers and checksums. Defined in docs/wire_format.md.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace gradferry {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

inline constexpr uint32_t kWireMagic = 0x59524647;  // "GFRY"
inline constexpr uint16_t kWireVersion = 2;

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
  uint8_t phase;
  uint8_t status;
  uint32_t source_rank;
  uint32_t payload_bytes;  // without header and without padding after the last tile
  uint64_t config_hash;
  uint64_t layout_hash;
  uint64_t step;
  uint64_t chunk;     // number of the chunk since attach; kParameters: of the next one
  uint64_t seed;      // Phase::kTensor: of the codec's random numbers; else 0
  uint64_t checksum;  // word_sum of the payload
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
  uint64_t checksum;  // word_sum of the 14 words before it, and of what follows as if it came next
};
static_assert(sizeof(CommitRecord) == 64);

// Weight of the first word of a checksum. Not 1: or a bit of that word and the same one of the
// checksum itself could be flipped unseen.
inline constexpr uint32_t kFirstWeight = 3;

// Sum of word[i] * (2 i + kFirstWeight) modulo 2^64: order-free, so that parts of a message are
// summed apart and added. docs/wire_format.md proves what it tells apart. `data` begins `offset`
// bytes, a multiple of 4, into what is summed.
inline uint64_t word_sum(const std::byte* data, size_t num_bytes, size_t offset = 0) {
  uint64_t sum = 0;
  uint64_t weight = offset / 2 + kFirstWeight;
  for (size_t i = 0; i < num_bytes / 4; ++i, weight += 2) {
    uint32_t word;
    __builtin_memcpy(&word, data + 4 * i, 4);
    sum += word * weight;
  }
  return sum;
}

}  // namespace gradferry
