#include "protocol/messages.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <string>

#include "gradferry/error.h"

namespace gradferry {
namespace {

// Checksum of a commit record, except its checksum field, and of the `map_bytes` bytes after it.
uint64_t commit_checksum(const std::byte* record, uint64_t map_bytes) {
  constexpr size_t kSummed = offsetof(CommitRecord, checksum);
  return word_sum(record, kSummed) + word_sum(record + sizeof(CommitRecord), map_bytes, kSummed);
}

}  // namespace

void write_header(std::byte* message, const Envelope& envelope, WireStatus status,
                  uint32_t payload_bytes, uint64_t checksum) {
  const MessageHeader header =
      make_header(envelope, payload_bytes, checksum, static_cast<uint32_t>(status));
  std::memcpy(message, &header, sizeof(header));
}

namespace {

Fault check_header(const std::byte* message, Envelope envelope, uint32_t source,
                   uint32_t payload_bytes, uint64_t checksum) {
  envelope.rank = source;
  HeaderWords received;
  std::memcpy(&received, message, sizeof(received));
  const HeaderMismatch found =
      first_mismatch(make_header(envelope, payload_bytes, checksum), received);
  if (found.status == WireStatus::kOk) return {};
  return {found.status, envelope.phase, source, envelope.chunk, found.expected, found.received};
}

}  // namespace

Fault check_message(const std::byte* message, Envelope envelope, uint32_t source,
                    uint32_t payload_bytes) {
  return check_header(message, envelope, source, payload_bytes,
                      word_sum(message + kHeaderBytes, payload_bytes));
}

Fault check_unsummed_message(const std::byte* message, Envelope envelope, uint32_t source,
                             uint32_t payload_bytes) {
  return check_header(message, envelope, source, payload_bytes, 0);
}

void expect_offsets_fit(uint64_t message_bytes, uint32_t world_size) {
  const uint64_t most_ranks = UINT32_MAX / message_bytes;
  GRADFERRY_EXPECTS(world_size <= most_ranks, kConfig,
                    "this model can be exchanged between " + std::to_string(most_ranks) +
                        " ranks at most, not " + std::to_string(world_size) +
                        ": the messages of one chunk, of up to " + std::to_string(message_bytes) +
                        " bytes each, would exceed 4 GiB; attach with codec='off'");
}

uint64_t hash_message_bytes(size_t num_parameters) {
  return kHeaderBytes + num_parameters * sizeof(uint64_t);
}

void write_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::vector<uint64_t>& hashes, std::byte* message) {
  const auto payload_bytes = static_cast<uint32_t>(hashes.size() * sizeof(uint64_t));
  std::memcpy(message + kHeaderBytes, hashes.data(), payload_bytes);
  write_header(message, agreement.envelope(step, next_chunk, Phase::kParameters), WireStatus::kOk,
               payload_bytes, word_sum(message + kHeaderBytes, payload_bytes));
}

Fault read_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::byte* received, size_t num_parameters,
                  std::vector<std::vector<uint64_t>>& by_rank) {
  const auto payload_bytes = static_cast<uint32_t>(num_parameters * sizeof(uint64_t));
  by_rank.assign(agreement.world_size, std::vector<uint64_t>(num_parameters));
  for (uint32_t rank = 0; rank < agreement.world_size; ++rank) {
    const std::byte* message = received + rank * hash_message_bytes(num_parameters);
    const Fault fault = check_message(
        message, agreement.envelope(step, next_chunk, Phase::kParameters), rank, payload_bytes);
    if (fault) return fault;
    std::memcpy(by_rank[rank].data(), message + kHeaderBytes, payload_bytes);
  }
  return {};
}

uint64_t commit_bytes(size_t num_used) { return sizeof(CommitRecord) + used_map_bytes(num_used); }

void write_commit(std::byte* place, uint32_t rank, uint64_t step, uint64_t bucket,
                  const Fault& fault, const UsedMap& used, float loss_scale) {
  std::byte* map = place + sizeof(CommitRecord);
  const uint64_t map_bytes = used_map_bytes(used.size());
  std::memset(map, 0, map_bytes);
  if (!used.empty()) std::memcpy(map, used.data(), used.size());
  CommitRecord record = make_commit(rank, step, bucket, fault, loss_scale);
  std::memcpy(place, &record, sizeof(record));
  record.checksum = commit_checksum(place, map_bytes);
  std::memcpy(place, &record, sizeof(record));
}

UsedMap read_used(const std::byte* received, uint32_t world_size, size_t num_used) {
  UsedMap used(num_used, 0);
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    const std::byte* map = received + rank * commit_bytes(num_used) + sizeof(CommitRecord);
    for (size_t i = 0; i < num_used; ++i) used[i] |= static_cast<uint8_t>(map[i]);
  }
  return used;
}

Verdict read_commit(const Agreement& agreement, const std::byte* received, uint64_t step,
                    uint64_t bucket, size_t num_used) {
  struct Check {
    WireStatus status;
    uint64_t expected, received;
  };
  const auto first_mismatch = [&](uint32_t rank, std::initializer_list<Check> checks) -> Fault {
    for (const Check& c : checks) {
      if (c.expected != c.received) {
        return {c.status, Phase::kCommit, rank, bucket, c.expected, c.received};
      }
    }
    return {};
  };
  const auto place = [&](uint32_t rank) { return received + rank * commit_bytes(num_used); };
  std::vector<CommitRecord> records(agreement.world_size);
  for (uint32_t rank = 0; rank < records.size(); ++rank) {
    std::memcpy(&records[rank], place(rank), sizeof(CommitRecord));
  }

  // A record that cannot be read is a fault that this rank reports itself.
  for (uint32_t rank = 0; rank < records.size(); ++rank) {
    const CommitRecord& record = records[rank];
    const uint64_t checksum = commit_checksum(place(rank), used_map_bytes(num_used));
    const Fault unreadable = first_mismatch(
        rank, {{WireStatus::kBadMagic, kWireMagic, record.magic},
               {WireStatus::kBadVersion, kWireVersion, record.wire_version},
               {WireStatus::kBadPhase, static_cast<uint64_t>(Phase::kCommit), record.phase},
               {WireStatus::kBadSource, rank, record.source_rank},
               {WireStatus::kBadChecksum, checksum, record.checksum}});
    if (unreadable) return {unreadable, agreement.rank, step};
  }
  // A cause comes before kPeerTrouble, its echo on other ranks.
  for (const bool echo : {false, true}) {
    for (uint32_t rank = 0; rank < records.size(); ++rank) {
      const CommitRecord& record = records[rank];
      const auto status = static_cast<WireStatus>(record.status);
      if (status == WireStatus::kOk || (status == WireStatus::kPeerTrouble) != echo) continue;
      const Fault fault{status,
                        static_cast<Phase>(record.failed_phase),
                        record.failed_rank,
                        record.failed_chunk,
                        record.expected,
                        record.received};
      return {fault, rank, record.step};
    }
  }
  for (uint32_t rank = 0; rank < records.size(); ++rank) {
    const Fault mismatch =
        first_mismatch(rank, {{WireStatus::kBadStep, step, records[rank].step},
                              {WireStatus::kBadChunk, bucket, records[rank].bucket}});
    if (mismatch) return {mismatch, agreement.rank, step};
  }
  const uint64_t scale = records.front().received;
  for (uint32_t rank = 0; rank < records.size(); ++rank) {
    const uint64_t other = records[rank].received;
    const bool sound = agreement.has_loss_scale ? is_loss_scale(other) : other == 0;
    if (sound && other == scale) continue;
    return {{WireStatus::kBadLossScale, Phase::kCommit, 0, bucket, scale, other}, rank, step};
  }
  return {};
}

}  // namespace gradferry
