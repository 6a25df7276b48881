#include "exchange.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>

#include "gradferry/error.h"

namespace gradferry {
namespace {

constexpr uint32_t kHeaderBytes = sizeof(MessageHeader);

std::byte* bytes(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

// Of a commit record and the `map_bytes` bytes after it, without the field that holds it.
uint64_t commit_checksum(const std::byte* record, uint64_t map_bytes) {
  constexpr size_t kSummed = offsetof(CommitRecord, checksum);
  return word_sum(record, kSummed) + word_sum(record + sizeof(CommitRecord), map_bytes, kSummed);
}

// What a message is about.
struct Place {
  uint64_t step;
  uint64_t chunk;
};

void write_header(std::byte* message, const Agreement& agreement, const Place& place, Phase phase,
                  WireStatus status, uint32_t payload_bytes, uint64_t checksum) {
  const MessageHeader header{.magic = kWireMagic,
                             .wire_version = kWireVersion,
                             .phase = static_cast<uint8_t>(phase),
                             .status = static_cast<uint8_t>(status),
                             .source_rank = agreement.rank,
                             .payload_bytes = payload_bytes,
                             .config_hash = agreement.config_hash,
                             .layout_hash = agreement.layout_hash,
                             .step = place.step,
                             .chunk = place.chunk,
                             .seed = 0,
                             .checksum = checksum};
  std::memcpy(message, &header, sizeof(header));
}

Fault check(const std::byte* message, const Agreement& agreement, const Place& place, Phase phase,
            uint32_t source, uint32_t payload_bytes) {
  MessageHeader header;
  std::memcpy(&header, message, sizeof(header));
  const auto fault = [&](WireStatus status, uint64_t expected, uint64_t received) {
    return Fault{status, phase, source, place.chunk, expected, received};
  };
  const struct {
    WireStatus status;
    uint64_t expected, received;
  } fields[] = {
      {WireStatus::kBadMagic, kWireMagic, header.magic},
      {WireStatus::kBadVersion, kWireVersion, header.wire_version},
      {WireStatus::kBadPhase, static_cast<uint64_t>(phase), header.phase},
      {WireStatus::kBadSource, source, header.source_rank},
      {WireStatus::kBadConfig, agreement.config_hash, header.config_hash},
      {WireStatus::kBadLayout, agreement.layout_hash, header.layout_hash},
      {WireStatus::kBadStep, place.step, header.step},
      {WireStatus::kBadChunk, place.chunk, header.chunk},
      {WireStatus::kBadPayloadBytes, payload_bytes, header.payload_bytes},
  };
  for (const auto& field : fields) {
    if (field.expected != field.received) {
      return fault(field.status, field.expected, field.received);
    }
  }
  // A sender in trouble reports through its own commit; its payload is not to be read.
  if (header.status != 0) return fault(WireStatus::kPeerTrouble, 0, header.status);
  const uint64_t checksum = word_sum(message + kHeaderBytes, payload_bytes);
  if (checksum != header.checksum) {
    return fault(WireStatus::kBadChecksum, header.checksum, checksum);
  }
  return {};
}

struct FieldText {
  const char* field;
  const char* advice;
};

// " (step 3, chunk 12, gather)"
std::string place_of(Phase phase, uint64_t step, uint64_t number) {
  const bool commit = phase == Phase::kCommit;
  const auto name_of = [](Phase p) {
    switch (p) {
      case Phase::kScatter: return "scatter";
      case Phase::kCommit: return "commit";
      case Phase::kParameters: return "check of parameters";
      default: return "gather";
    }
  };
  const char* name = name_of(phase);
  return " (step " + std::to_string(step) + (commit ? ", bucket " : ", chunk ") +
         std::to_string(number) + ", " + name + ")";
}

// "rank 1", "ranks 1 and 2", "ranks 0, 1, ... and 9 more".
std::string name_ranks(const std::vector<uint32_t>& ranks) {
  constexpr size_t kShown = 8;
  const size_t shown = std::min(ranks.size(), kShown);
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < shown; ++i) {
    const bool last = i + 1 == ranks.size();
    text += (i == 0 ? "" : last ? " and " : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > shown) text += " and " + std::to_string(ranks.size() - shown) + " more";
  return text;
}

// What gloo says in terms of its own sources, addresses and calls.
std::string plain_reason(const std::string& reason) {
  for (const char* words : {"closed by peer", "reset by peer", "Broken pipe"}) {
    if (reason.find(words) != std::string::npos) return "its connection was closed";
  }
  if (reason.find("imed out") != std::string::npos) {
    return "nothing came within the timeout of the process group";
  }
  return reason.substr(0, reason.find('\n'));
}

FieldText text_of(WireStatus status) {
  constexpr const char* kForeign =
      "something else used gradferry's connections, or bytes were damaged on the way";
  constexpr const char* kOrder =
      "the ranks no longer run the same sequence of buckets: check that every rank runs the same "
      "model, the same number of backward passes, and resumed from the same checkpoint";
  switch (status) {
    case WireStatus::kBadMagic: return {"magic", kForeign};
    case WireStatus::kBadVersion: return {"wire version", "install one gradferry on all ranks"};
    case WireStatus::kBadPhase: return {"phase", kOrder};
    case WireStatus::kBadSource: return {"source rank", kForeign};
    case WireStatus::kBadConfig: return {"configuration hash", kOrder};
    case WireStatus::kBadLayout: return {"layout hash", kOrder};
    case WireStatus::kBadStep: return {"step", kOrder};
    case WireStatus::kBadChunk: return {"chunk", kOrder};
    case WireStatus::kBadPayloadBytes: return {"payload bytes", kOrder};
    case WireStatus::kBadChecksum:
      return {"checksum", "bytes were damaged on the way; check the network and the memory"};
    case WireStatus::kCorruptPayload:
      return {"number of corrupt tiles", "the sender's codec misbehaves; please report it"};
    default: return {"status", "see the error of that rank"};
  }
}

}  // namespace

std::string describe(const Fault& fault, uint32_t reporter, uint64_t step) {
  const std::string where = place_of(fault.phase, step, fault.chunk);
  if (fault.status == WireStatus::kLocalFailure) {
    return "rank " + std::to_string(reporter) + " failed while it compressed gradients" + where +
           "; the reason is in that rank's own error";
  }
  FieldText text = text_of(fault.status);
  if (fault.phase == Phase::kCommit && fault.status == WireStatus::kBadChunk) text.field = "bucket";
  return "rank " + std::to_string(reporter) + " refused a message from rank " +
         std::to_string(fault.rank) + where + ": " + text.field + " is " +
         std::to_string(fault.received) + ", expected " + std::to_string(fault.expected) + "; " +
         text.advice;
}

Error lost_contact(Peers& peers, uint32_t rank, Phase phase, uint64_t step, uint64_t number,
                   const std::string& reason) {
  const Loss loss = peers.look_around();
  if (!loss.error.empty()) return {ErrorKind::kPeer, loss.error};
  std::string text = "rank " + std::to_string(rank) + " lost contact with " +
                     (loss.missing.empty() ? "another rank" : name_ranks(loss.missing)) +
                     place_of(phase, step, number) + ": " + plain_reason(reason);
  if (!loss.store_answers) {
    text += ", and the store of the process group does not answer (mostly rank 0 serves it)";
  }
  return {ErrorKind::kPeer, text + "; look at the other ranks' errors first, then restart"};
}

void expect_offsets_fit(uint64_t message_bytes, uint32_t world_size) {
  const uint64_t most_ranks = UINT32_MAX / message_bytes;
  GRADFERRY_EXPECTS(world_size <= most_ranks, kConfig,
                    "this model can be exchanged between " + std::to_string(most_ranks) +
                        " ranks at most, not " + std::to_string(world_size) +
                        ": the messages of one chunk, of up to " + std::to_string(message_bytes) +
                        " bytes each, would exceed 4 GiB; attach with codec='off'");
}

Slot make_slot(uint32_t world_size, uint64_t message_bytes) {
  const auto single = static_cast<int64_t>(message_bytes);
  const int64_t all = single * world_size;
  const auto options = at::TensorOptions().dtype(at::kByte);
  return {at::zeros({all}, options), at::zeros({all}, options), at::zeros({single}, options),
          at::zeros({all}, options)};
}

void Exchange::wait(const Pending& work, Phase phase, uint64_t step, uint64_t number) const {
  try {
    peers_.wait(*work);
  } catch (const std::exception& error) {
    throw lost_contact(peers_, agreement_.rank, phase, step, number, error.what());
  }
}

void Exchange::post_scatter(Chunk& chunk, WireStatus status,
                            const std::vector<uint64_t>& checksums) {
  const auto& shards = chunk.plan->shards;
  std::vector<int64_t> send_bytes(shards.size());
  const int64_t own = kHeaderBytes + shards[agreement_.rank].worker_bytes;
  const std::vector<int64_t> receive_bytes(shards.size(), own);
  int64_t offset = 0;
  for (uint32_t p = 0; p < shards.size(); ++p) {
    write_header(bytes(chunk.slot->scatter_send) + offset, agreement_, {chunk.step, chunk.number},
                 Phase::kScatter, status, shards[p].worker_bytes, checksums[p]);
    send_bytes[p] = kHeaderBytes + shards[p].worker_bytes;
    offset += send_bytes[p];
  }
  chunk.scatter = scatter_lane_.all_to_all(
      chunk.slot->scatter_receive.narrow(0, 0, own * static_cast<int64_t>(shards.size())),
      receive_bytes, chunk.slot->scatter_send.narrow(0, 0, offset), send_bytes);
}

Fault Exchange::wait_scatter(Chunk& chunk) {
  wait(chunk.scatter, Phase::kScatter, chunk.step, chunk.number);
  chunk.scatter.reset();
  const Shard& own = chunk.plan->shards[agreement_.rank];
  for (uint32_t rank = 0; rank < agreement_.world_size; ++rank) {
    const Fault fault = check(scattered_payload(chunk, rank) - kHeaderBytes, agreement_,
                              {chunk.step, chunk.number}, Phase::kScatter, rank, own.worker_bytes);
    if (fault) return fault;
  }
  return {};
}

const std::byte* Exchange::scattered_payload(const Chunk& chunk, uint32_t rank) const {
  const uint64_t stride = kHeaderBytes + chunk.plan->shards[agreement_.rank].worker_bytes;
  return bytes(chunk.slot->scatter_receive) + rank * stride + kHeaderBytes;
}

void Exchange::post_gather(Chunk& chunk, WireStatus status, uint64_t checksum) {
  const int64_t size = chunk.plan->gather_message_bytes;
  write_header(bytes(chunk.slot->gather_send), agreement_, {chunk.step, chunk.number},
               Phase::kGather, status, chunk.plan->shards[agreement_.rank].owner_bytes, checksum);
  chunk.gather =
      gather_lane_.all_gather(chunk.slot->gather_receive.narrow(0, 0, size * agreement_.world_size),
                              chunk.slot->gather_send.narrow(0, 0, size));
}

Fault Exchange::wait_gather(Chunk& chunk) {
  wait(chunk.gather, Phase::kGather, chunk.step, chunk.number);
  chunk.gather.reset();
  for (uint32_t rank = 0; rank < agreement_.world_size; ++rank) {
    const Shard& shard = chunk.plan->shards[rank];
    const std::byte* message =
        bytes(chunk.slot->gather_receive) + uint64_t{rank} * chunk.plan->gather_message_bytes;
    const Fault fault = check(message, agreement_, {chunk.step, chunk.number}, Phase::kGather, rank,
                              shard.owner_bytes);
    if (fault) return fault;
  }
  return {};
}

Pending Exchange::post_commit(at::Tensor send, at::Tensor receive, uint64_t step, uint64_t bucket,
                              const Fault& fault, const UsedMap& used) {
  std::byte* map = bytes(send) + sizeof(CommitRecord);
  const uint64_t map_bytes = used_map_bytes(used.size());
  std::memset(map, 0, map_bytes);
  if (!used.empty()) std::memcpy(map, used.data(), used.size());
  CommitRecord record{.magic = kWireMagic,
                      .wire_version = kWireVersion,
                      .phase = static_cast<uint16_t>(Phase::kCommit),
                      .status = static_cast<uint32_t>(fault.status),
                      .source_rank = agreement_.rank,
                      .step = step,
                      .bucket = bucket,
                      .failed_chunk = 0,
                      .failed_phase = 0,
                      .failed_rank = 0,
                      .expected = fault.expected,
                      .received = fault.received,
                      .checksum = 0};
  if (fault) {
    record.failed_chunk = static_cast<uint32_t>(fault.chunk);
    record.failed_phase = static_cast<uint16_t>(fault.phase);
    record.failed_rank = static_cast<uint16_t>(fault.rank);
  }
  std::memcpy(bytes(send), &record, sizeof(record));
  record.checksum = commit_checksum(bytes(send), map_bytes);
  std::memcpy(bytes(send), &record, sizeof(record));
  return commit_lane_.all_gather(std::move(receive), std::move(send));
}

Fault Exchange::gather_hashes(const std::vector<uint64_t>& own, uint64_t step, uint64_t next_chunk,
                              std::vector<std::vector<uint64_t>>& by_rank) {
  const auto size = static_cast<int64_t>(hash_message_bytes(own.size()));
  const auto options = at::TensorOptions().dtype(at::kByte);
  const at::Tensor send = at::zeros({size}, options);
  const at::Tensor receive = at::zeros({size * agreement_.world_size}, options);
  write_hashes(agreement_, step, next_chunk, own, bytes(send));
  wait(scatter_lane_.all_gather(receive, send), Phase::kParameters, step, next_chunk);
  return read_hashes(agreement_, step, next_chunk, bytes(receive), own.size(), by_rank);
}

uint64_t hash_message_bytes(size_t num_parameters) {
  return kHeaderBytes + num_parameters * sizeof(uint64_t);
}

void write_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::vector<uint64_t>& own, std::byte* message) {
  const auto payload_bytes = static_cast<uint32_t>(own.size() * sizeof(uint64_t));
  std::memcpy(message + kHeaderBytes, own.data(), payload_bytes);
  write_header(message, agreement, {step, next_chunk}, Phase::kParameters, WireStatus::kOk,
               payload_bytes, word_sum(message + kHeaderBytes, payload_bytes));
}

Fault read_hashes(const Agreement& agreement, uint64_t step, uint64_t next_chunk,
                  const std::byte* received, size_t num_parameters,
                  std::vector<std::vector<uint64_t>>& by_rank) {
  const auto payload_bytes = static_cast<uint32_t>(num_parameters * sizeof(uint64_t));
  by_rank.assign(agreement.world_size, std::vector<uint64_t>(num_parameters));
  for (uint32_t rank = 0; rank < agreement.world_size; ++rank) {
    const std::byte* message = received + rank * hash_message_bytes(num_parameters);
    const Fault fault =
        check(message, agreement, {step, next_chunk}, Phase::kParameters, rank, payload_bytes);
    if (fault) return fault;
    std::memcpy(by_rank[rank].data(), message + kHeaderBytes, payload_bytes);
  }
  return {};
}

uint64_t commit_bytes(size_t num_used) { return sizeof(CommitRecord) + used_map_bytes(num_used); }

UsedMap read_used(const at::Tensor& received, uint32_t world_size, size_t num_used) {
  UsedMap used(num_used, 0);
  for (uint32_t rank = 0; rank < world_size; ++rank) {
    const std::byte* map = bytes(received) + rank * commit_bytes(num_used) + sizeof(CommitRecord);
    for (size_t i = 0; i < num_used; ++i) used[i] |= static_cast<uint8_t>(map[i]);
  }
  return used;
}

Fault read_commit(const Agreement& agreement, const at::Tensor& received, uint64_t step,
                  uint64_t bucket, uint32_t* reporter, size_t num_used) {
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
  const auto place = [&](uint32_t rank) { return bytes(received) + rank * commit_bytes(num_used); };
  std::vector<CommitRecord> records(agreement.world_size);
  for (uint32_t rank = 0; rank < records.size(); ++rank) {
    std::memcpy(&records[rank], place(rank), sizeof(CommitRecord));
  }

  // A record that cannot be read is this rank's own finding.
  *reporter = agreement.rank;
  for (uint32_t rank = 0; rank < records.size(); ++rank) {
    const CommitRecord& record = records[rank];
    const uint64_t checksum = commit_checksum(place(rank), used_map_bytes(num_used));
    const Fault unreadable = first_mismatch(
        rank, {{WireStatus::kBadMagic, kWireMagic, record.magic},
               {WireStatus::kBadVersion, kWireVersion, record.wire_version},
               {WireStatus::kBadPhase, static_cast<uint64_t>(Phase::kCommit), record.phase},
               {WireStatus::kBadSource, rank, record.source_rank},
               {WireStatus::kBadChecksum, checksum, record.checksum}});
    if (unreadable) return unreadable;
  }
  // The cause before its echoes.
  for (const bool echo : {false, true}) {
    for (uint32_t rank = 0; rank < records.size(); ++rank) {
      const CommitRecord& record = records[rank];
      const auto status = static_cast<WireStatus>(record.status);
      if (status == WireStatus::kOk || (status == WireStatus::kPeerTrouble) != echo) continue;
      *reporter = rank;
      return {status,
              static_cast<Phase>(record.failed_phase),
              record.failed_rank,
              record.failed_chunk,
              record.expected,
              record.received};
    }
  }
  for (uint32_t rank = 0; rank < records.size(); ++rank) {
    const Fault mismatch =
        first_mismatch(rank, {{WireStatus::kBadStep, step, records[rank].step},
                              {WireStatus::kBadChunk, bucket, records[rank].bucket}});
    if (mismatch) return mismatch;
  }
  return {};
}

}  // namespace gradferry
