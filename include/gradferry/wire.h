// Message headers and checksums, as docs/reference/wire_format.md defines them.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace gradferry {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

inline constexpr uint32_t kWireMagic = 0x59524647;  // "GFRY"
inline constexpr uint16_t kWireVersion = 2;

enum class Phase : uint16_t {
  kScatter = 1,
  kGather = 2,
  kCommit = 3,
  kTensor = 4,
  kParameters = 5,
  kLocalScatter = 6,
  kForward = 7
};

// The error of a rank; kOk in every message of a rank without one.
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
  kPeerTrouble = 13,  // received another rank's error status; that rank's commit has the cause
  // An owner's mean is not finite, which was to be an error; `received` is the number of its tile.
  // Only in a reduce-scatter, where other ranks cannot see it.
  kNonFiniteMean = 14,
  // The loss scales in the commits of all ranks are not one number. No rank sends it: all see it.
  kBadLossScale = 15,
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
inline constexpr uint32_t kHeaderBytes = sizeof(MessageHeader);

// --- the law of headers
//
// The only definition of the fields that a sender writes and a receiver requires: hosts and devices
// write headers with make_header() and check received ones with first_mismatch().

// The fields that the sender and the receiver of a message must agree on.
struct Envelope {
  uint64_t config_hash;
  uint64_t layout_hash;
  uint64_t step;
  uint64_t chunk;
  uint32_t rank;  // the sender
  Phase phase;
};

constexpr MessageHeader make_header(const Envelope& envelope, uint32_t payload_bytes,
                                    uint64_t checksum, uint32_t status = 0) {
  return {.magic = kWireMagic,
          .wire_version = kWireVersion,
          .phase = static_cast<uint8_t>(envelope.phase),
          .status = static_cast<uint8_t>(status),
          .source_rank = envelope.rank,
          .payload_bytes = payload_bytes,
          .config_hash = envelope.config_hash,
          .layout_hash = envelope.layout_hash,
          .step = envelope.step,
          .chunk = envelope.chunk,
          .seed = 0,
          .checksum = checksum};
}

struct HeaderField {
  const char* name;
  uint32_t offset;  // bytes
  uint32_t num_bytes;
  WireStatus mismatch;  // the status of a message whose field has a wrong value
};

// The fields that must have one exact value, in the order in which they are checked. Only
// MessageHeader::seed may have any value.
#define GRADFERRY_HEADER_FIELD(name, mismatch) \
  {#name, offsetof(MessageHeader, name), sizeof(MessageHeader::name), WireStatus::mismatch}
inline constexpr std::array<HeaderField, 11> kHeaderFields{{
    GRADFERRY_HEADER_FIELD(magic, kBadMagic),
    GRADFERRY_HEADER_FIELD(wire_version, kBadVersion),
    GRADFERRY_HEADER_FIELD(phase, kBadPhase),
    GRADFERRY_HEADER_FIELD(source_rank, kBadSource),
    GRADFERRY_HEADER_FIELD(config_hash, kBadConfig),
    GRADFERRY_HEADER_FIELD(layout_hash, kBadLayout),
    GRADFERRY_HEADER_FIELD(step, kBadStep),
    GRADFERRY_HEADER_FIELD(chunk, kBadChunk),
    GRADFERRY_HEADER_FIELD(payload_bytes, kBadPayloadBytes),
    // A sender with an error reports it in its own commit; its payload has no meaning.
    GRADFERRY_HEADER_FIELD(status, kPeerTrouble),
    GRADFERRY_HEADER_FIELD(checksum, kBadChecksum),
}};
#undef GRADFERRY_HEADER_FIELD

// The first difference between a received header and the expected one; status kOk: there is none.
struct HeaderMismatch {
  WireStatus status = WireStatus::kOk;
  uint64_t expected = 0;
  uint64_t received = 0;
};

// A MessageHeader as 32-bit words, in memory order.
struct HeaderWords {
  uint32_t word[sizeof(MessageHeader) / 4];
};

constexpr uint64_t header_value(const HeaderWords& words, const HeaderField& field) {
  const uint64_t low = words.word[field.offset / 4] >> (8 * (field.offset % 4));
  if (field.num_bytes == 8) return low | uint64_t{words.word[field.offset / 4 + 1]} << 32;
  return low & ((uint64_t{1} << (8 * field.num_bytes)) - 1);
}

// `expected`: from make_header(), with the checksum of the received payload.
constexpr HeaderMismatch first_mismatch(const MessageHeader& expected,
                                        const HeaderWords& received) {
  const auto lawful = std::bit_cast<HeaderWords>(expected);
  HeaderMismatch first;
  // Unrolled, because device code can use constants of the host but not their addresses.
  const auto compare = [&]<size_t i>() {
    constexpr HeaderField field = kHeaderFields[i];
    const uint64_t wanted = header_value(lawful, field), came = header_value(received, field);
    if (first.status == WireStatus::kOk && wanted != came) first = {field.mismatch, wanted, came};
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (compare.template operator()<i>(), ...);
  }(std::make_index_sequence<kHeaderFields.size()>());
  // The checksum in the header is the sender's, so in an error message it is the expected one.
  if (first.status == WireStatus::kBadChecksum) std::swap(first.expected, first.received);
  return first;
}

// Ends every bucket: every rank sends one to all. It carries the first error of its rank, with both
// values, so that all ranks raise the same error; or, without one, the rank's loss scale.
struct CommitRecord {
  uint32_t magic;
  uint16_t wire_version;
  uint16_t phase;  // Phase::kCommit
  uint32_t status;
  uint32_t source_rank;
  uint64_t step;
  uint64_t bucket;        // number of the bucket since the codec was attached
  uint32_t failed_chunk;  // low 32 bits; 0 when status is kOk, as in all that follow but one
  uint16_t failed_phase;
  uint16_t failed_rank;  // whose message was rejected, low 16 bits
  uint64_t expected;
  uint64_t received;  // when status is kOk: the bits of the fp32 loss scale; 0: no GradScaler
  uint64_t checksum;  // word_sum of the 14 words before it, followed by the words after it
};
static_assert(sizeof(CommitRecord) == 64);

// A commit without its checksum. `Fault` has status, chunk, phase, rank, expected and received,
// which count if its status is an error. `loss_scale`: of the pass; 0: there is no GradScaler.
template <class Fault>
constexpr CommitRecord make_commit(uint32_t rank, uint64_t step, uint64_t bucket,
                                   const Fault& fault, float loss_scale) {
  CommitRecord record{.magic = kWireMagic,
                      .wire_version = kWireVersion,
                      .phase = static_cast<uint16_t>(Phase::kCommit),
                      .status = static_cast<uint32_t>(fault.status),
                      .source_rank = rank,
                      .step = step,
                      .bucket = bucket,
                      .failed_chunk = 0,
                      .failed_phase = 0,
                      .failed_rank = 0,
                      .expected = 0,
                      .received = std::bit_cast<uint32_t>(loss_scale),
                      .checksum = 0};
  if (record.status != static_cast<uint32_t>(WireStatus::kOk)) {
    record.failed_chunk = static_cast<uint32_t>(fault.chunk);
    record.failed_phase = static_cast<uint16_t>(fault.phase);
    record.failed_rank = static_cast<uint16_t>(fault.rank);
    record.expected = fault.expected;
    record.received = fault.received;
  }
  return record;
}

// Weight of the first word of a checksum. With 1, a flipped bit of that word and the same bit of
// the checksum itself could cancel.
inline constexpr uint32_t kFirstWeight = 3;

// Sum of word[i] * (2 i + kFirstWeight) modulo 2^64. The order does not matter, so parts of a
// message can be summed separately and added. docs/reference/wire_format.md proves which errors it
// detects. `data` is in host memory and begins `offset` bytes, a multiple of 4, after the start of
// the sum.
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
