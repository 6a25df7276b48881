#include "host/exchange.h"

#include <cstddef>
#include <utility>

#include "tensor_bytes.h"

namespace gradferry {
Slot make_slot(const Workspace& workspace) {
  const auto make = [](uint64_t num_bytes) {
    return at::zeros({static_cast<int64_t>(num_bytes)}, at::TensorOptions().dtype(at::kByte));
  };
  Slot slot{
      make(workspace.send_bytes), make(workspace.receive_bytes), make(workspace.message_bytes), {}};
  slot.gather_receive =
      workspace.shared_receive ? slot.scatter_receive : make(workspace.receive_bytes);
  return slot;
}

void Exchange::wait(const Pending& work, Phase phase, uint64_t step, uint64_t number) const {
  try {
    peers_.wait(*work);
  } catch (const std::exception& error) {
    throw lost_contact(peers_, agreement_.rank, phase, step, number, error.what());
  }
}

// One message to every owner. All-to-all allows messages of different sizes, without gaps.
void Exchange::post_scatter(Chunk& chunk, WireStatus status,
                            const std::vector<uint64_t>& checksums) {
  const auto& shards = chunk.plan->shards;
  std::vector<int64_t> send_bytes(shards.size());
  const int64_t mine = kHeaderBytes + shards[agreement_.rank].worker_bytes;
  const std::vector<int64_t> receive_bytes(shards.size(), mine);
  const Envelope envelope = agreement_.envelope(chunk.step, chunk.number, Phase::kScatter);
  int64_t offset = 0;
  for (uint32_t p = 0; p < shards.size(); ++p) {
    write_header(bytes(chunk.slot->scatter_send) + offset, envelope, status, shards[p].worker_bytes,
                 checksums[p]);
    send_bytes[p] = kHeaderBytes + shards[p].worker_bytes;
    offset += send_bytes[p];
  }
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
    const Fault fault =
        check_message(scattered_payload(chunk, rank) - kHeaderBytes, envelope, rank, payload_bytes);
    if (fault) return fault;
  }
  return {};
}

const std::byte* Exchange::scattered_payload(const Chunk& chunk, uint32_t rank) const {
  const uint64_t stride = kHeaderBytes + chunk.plan->shards[agreement_.rank].worker_bytes;
  return bytes(chunk.slot->scatter_receive) + rank * stride + kHeaderBytes;
}

// All-gather needs messages of one size, so all are padded to the longest; the header of each holds
// its payload size.
void Exchange::post_gather(Chunk& chunk, WireStatus status, uint64_t checksum) {
  const int64_t size = chunk.plan->gather_message_bytes;
  write_header(bytes(chunk.slot->gather_send),
               agreement_.envelope(chunk.step, chunk.number, Phase::kGather), status,
               chunk.plan->shards[agreement_.rank].owner_bytes, checksum);
  chunk.gather =
      gather_lane_.all_gather(chunk.slot->gather_receive.narrow(0, 0, size * agreement_.world_size),
                              chunk.slot->gather_send.narrow(0, 0, size));
}

Fault Exchange::wait_gather(Chunk& chunk) {
  wait(chunk.gather, Phase::kGather, chunk.step, chunk.number);
  chunk.gather.reset();
  const Envelope envelope = agreement_.envelope(chunk.step, chunk.number, Phase::kGather);
  for (uint32_t rank = 0; rank < agreement_.world_size; ++rank) {
    const std::byte* message =
        bytes(chunk.slot->gather_receive) + uint64_t{rank} * chunk.plan->gather_message_bytes;
    const Fault fault =
        check_message(message, envelope, rank, chunk.plan->shards[rank].owner_bytes);
    if (fault) return fault;
  }
  return {};
}

Pending Exchange::post_commit(at::Tensor send, at::Tensor receive, uint64_t step, uint64_t bucket,
                              const Fault& fault, const UsedMap& used) {
  write_commit(bytes(send), agreement_.rank, step, bucket, fault, used);
  return commit_lane_.all_gather(std::move(receive), std::move(send));
}

// On the scatter lane: the calling thread owns that lane, and posts nothing else meanwhile.
Fault Exchange::gather_hashes(const std::vector<uint64_t>& hashes, uint64_t step,
                              uint64_t next_chunk, std::vector<std::vector<uint64_t>>& by_rank) {
  const auto size = static_cast<int64_t>(hash_message_bytes(hashes.size()));
  const auto options = at::TensorOptions().dtype(at::kByte);
  const at::Tensor send = at::zeros({size}, options);
  const at::Tensor receive = at::zeros({size * agreement_.world_size}, options);
  write_hashes(agreement_, step, next_chunk, hashes, bytes(send));
  wait(scatter_lane_.all_gather(receive, send), Phase::kParameters, step, next_chunk);
  return read_hashes(agreement_, step, next_chunk, bytes(receive), hashes.size(), by_rank);
}

}  // namespace gradferry
