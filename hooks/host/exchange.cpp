#include "host/exchange.h"

#include <chrono>
#include <cstddef>
#include <cstring>

#include "tensor_bytes.h"

namespace gradferry {
Slot make_slot(const Workspace& workspace) {
  const auto make = [](uint64_t num_bytes) {
    return at::zeros({static_cast<int64_t>(num_bytes)}, at::TensorOptions().dtype(at::kByte));
  };
  Slot slot{make(workspace.send_bytes), make(workspace.receive_bytes), {}, {}};
  slot.gathered = workspace.shared_receive ? slot.scatter_receive : make(workspace.receive_bytes);
  if (workspace.own_message_bytes != 0) slot.own_message = make(workspace.own_message_bytes);
  return slot;
}

void Exchange::wait(const Pending& work, Phase phase, uint64_t step, uint64_t number) const {
  try {
    peers_.wait(*work);
  } catch (const std::exception& error) {
    throw lost_contact(peers_, agreement_.rank, phase, step, number, error.what());
  }
}

bool Exchange::has_come(const Pending& work) {
  constexpr std::chrono::milliseconds kAtOnce{100};
  try {
    work->wait(kAtOnce);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// One message to every owner. All-to-all allows messages of different sizes, without gaps.
void Exchange::post_scatter(Chunk& chunk, WireStatus status,
                            const std::vector<uint64_t>& checksums) {
  const auto& shards = chunk.plan->shards;
  std::vector<int64_t> send_bytes(shards.size());
  const int64_t mine = shards[agreement_.rank].scatter_bytes;
  const std::vector<int64_t> receive_bytes(shards.size(), mine);
  const Envelope envelope = agreement_.envelope(chunk.step, chunk.number, Phase::kScatter);
  int64_t offset = 0;
  for (uint32_t p = 0; p < shards.size(); ++p) {
    write_header(bytes(chunk.slot->scatter_send) + offset, envelope, status, shards[p].worker_bytes,
                 checksums[p]);
    send_bytes[p] = shards[p].scatter_bytes;
    offset += send_bytes[p];
  }
  sent_bytes_.fetch_add(static_cast<uint64_t>(offset - send_bytes[agreement_.rank]),
                        std::memory_order_relaxed);
  chunk.scatter = scatter_lane_.all_to_all(
      chunk.slot->scatter_receive.narrow(0, 0, mine * static_cast<int64_t>(shards.size())),
      receive_bytes, chunk.slot->scatter_send.narrow(0, 0, offset), send_bytes);
}

Fault Exchange::wait_scatter(Chunk& chunk) {
  wait(chunk.scatter, Phase::kScatter, chunk.step, chunk.number);
  chunk.scatter.reset();
  const Envelope envelope = agreement_.envelope(chunk.step, chunk.number, Phase::kScatter);
  const uint32_t payload_bytes = chunk.plan->shards[agreement_.rank].worker_bytes;
  for (uint32_t rank = 0; rank < agreement_.world_size; ++rank) {
    if (rank == agreement_.rank) continue;
    const Fault fault =
        check_message(scattered_payload(chunk, rank) - kHeaderBytes, envelope, rank, payload_bytes);
    if (fault) return fault;
  }
  return {};
}

// Its own is where it was written: lanes need not copy it.
const std::byte* Exchange::scattered_payload(const Chunk& chunk, uint32_t rank) const {
  const auto& shards = chunk.plan->shards;
  if (rank == agreement_.rank) {
    uint64_t offset = kHeaderBytes;
    for (uint32_t p = 0; p < rank; ++p) offset += shards[p].scatter_bytes;
    return bytes(chunk.slot->scatter_send) + offset;
  }
  const uint64_t stride = shards[agreement_.rank].scatter_bytes;
  return bytes(chunk.slot->scatter_receive) + rank * stride + kHeaderBytes;
}

std::byte* Exchange::gather_message(const Chunk& chunk) const {
  const Slot& slot = *chunk.slot;
  return slot.own_message.defined() ? bytes(slot.own_message) : own_place(chunk);
}

std::byte* Exchange::own_place(const Chunk& chunk) const {
  return bytes(chunk.slot->gathered) + uint64_t{agreement_.rank} * chunk.plan->gather_message_bytes;
}

Pending Exchange::post_all_gather(Lane& lane, const at::Tensor& messages, const at::Tensor& own) {
  sent_bytes_.fetch_add(static_cast<uint64_t>(own.numel()) * (agreement_.world_size - 1),
                        std::memory_order_relaxed);
  return lane.all_gather(messages, own);
}

Pending Exchange::post_all_gather(Lane& lane, const at::Tensor& messages) {
  const int64_t size = messages.numel() / agreement_.world_size;
  return post_all_gather(lane, messages, messages.narrow(0, size * agreement_.rank, size));
}

// All-gather needs messages of one size, so all are padded to the longest; the header of each holds
// its payload size.
void Exchange::post_gather(Chunk& chunk, WireStatus status, uint64_t checksum) {
  const int64_t size = chunk.plan->gather_message_bytes;
  write_header(gather_message(chunk), agreement_.envelope(chunk.step, chunk.number, Phase::kGather),
               status, chunk.plan->shards[agreement_.rank].owner_bytes, checksum);
  const Slot& slot = *chunk.slot;
  const at::Tensor messages = slot.gathered.narrow(0, 0, size * agreement_.world_size);
  chunk.gather = slot.own_message.defined()
                     ? post_all_gather(gather_lane_, messages, slot.own_message.narrow(0, 0, size))
                     : post_all_gather(gather_lane_, messages);
}

Fault Exchange::wait_gather(Chunk& chunk) {
  wait(chunk.gather, Phase::kGather, chunk.step, chunk.number);
  chunk.gather.reset();
  // Lanes need not put it there.
  if (chunk.slot->own_message.defined()) {
    std::memcpy(own_place(chunk), gather_message(chunk), chunk.plan->gather_message_bytes);
  }
  const Envelope envelope = agreement_.envelope(chunk.step, chunk.number, Phase::kGather);
  for (uint32_t rank = 0; rank < agreement_.world_size; ++rank) {
    if (rank == agreement_.rank) continue;
    const std::byte* message =
        bytes(chunk.slot->gathered) + uint64_t{rank} * chunk.plan->gather_message_bytes;
    const Fault fault =
        check_message(message, envelope, rank, chunk.plan->shards[rank].owner_bytes);
    if (fault) return fault;
  }
  return {};
}

Pending Exchange::post_commit(const at::Tensor& commits, uint64_t step, uint64_t bucket,
                              const Fault& fault, const UsedMap& used) {
  write_commit(bytes(commits) + agreement_.rank * commit_bytes(used.size()), agreement_.rank, step,
               bucket, fault, used);
  return post_all_gather(commit_lane_, commits);
}

// On the scatter lane: the calling thread owns that lane, and posts nothing else meanwhile.
Fault Exchange::gather_hashes(const std::vector<uint64_t>& hashes, uint64_t step,
                              uint64_t next_chunk, std::vector<std::vector<uint64_t>>& by_rank) {
  const auto size = static_cast<int64_t>(hash_message_bytes(hashes.size()));
  const auto options = at::TensorOptions().dtype(at::kByte);
  const at::Tensor receive = at::zeros({size * agreement_.world_size}, options);
  write_hashes(agreement_, step, next_chunk, hashes, bytes(receive) + size * agreement_.rank);
  wait(post_all_gather(scatter_lane_, receive), Phase::kParameters, step, next_chunk);
  return read_hashes(agreement_, step, next_chunk, bytes(receive), hashes.size(), by_rank);
}

}  // namespace gradferry
