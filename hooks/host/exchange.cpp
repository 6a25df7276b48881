#include "host/exchange.h"

#include <ATen/ops/from_blob.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "lane.h"

namespace gradferry {
namespace {

bool siblings_share(const Slot& slot) { return slot.dense_shared.defined(); }

// Zeros that take no memory before they are touched: in a large world there is room for a tile from
// every rank, of which small buckets use little. They begin with a cache line.
at::Tensor untouched_zeros(uint64_t num_bytes) {
  constexpr size_t kLineBytes = 64;
  size_t room = num_bytes + kLineBytes;
  void* const memory = std::calloc(room, 1);
  if (memory == nullptr) throw std::bad_alloc();
  void* begin = memory;
  std::align(kLineBytes, num_bytes, begin, room);
  // Not a deleter of from_blob(): it takes memory where nothing may be thrown.
  return at::for_blob(begin, {static_cast<int64_t>(num_bytes)})
      .context(memory, &std::free)
      .options(at::TensorOptions().dtype(at::kByte))
      .make_tensor();
}

}  // namespace

Slot make_slot(const Workspace& workspace, SharedMemory* memory, uint64_t number) {
  Slot slot;
  slot.dense_send = untouched_zeros(workspace.dense_send_bytes);
  slot.dense_receive = untouched_zeros(workspace.dense_receive_bytes);
  slot.sum = untouched_zeros(workspace.sum_bytes);
  slot.scatter_send = untouched_zeros(workspace.send_bytes);
  slot.scatter_receive = untouched_zeros(workspace.receive_bytes);
  if (memory != nullptr) {
    const uint64_t begin = number * workspace.shared_bytes, gathered = workspace.gathered_bytes;
    slot.gathered = memory->part(begin, gathered);
    slot.dense_shared = memory->part(begin + gathered, workspace.shared_bytes - gathered);
    slot.dense_place_bytes = workspace.dense_place_bytes;
    return slot;
  }
  slot.gathered =
      workspace.shared_receive ? slot.scatter_receive : untouched_zeros(workspace.gathered_bytes);
  if (workspace.own_message_bytes != 0) {
    slot.own_message = untouched_zeros(workspace.own_message_bytes);
  }
  return slot;
}

Exchange::Exchange(const Agreement& agreement, const Nodes& nodes, Peers& peers,
                   ExchangeLanes lanes)
    : agreement_(agreement),
      nodes_(nodes),
      siblings_(nodes.siblings(agreement.rank)),
      node_(nodes.node_of(agreement.rank)),
      local_index_(nodes.local_index(agreement.rank)),
      peers_(peers),
      lanes_(std::move(lanes)) {
  for (uint32_t rail = 0; rail < nodes.num_rails(); ++rail) {
    rails_.push_back(nodes.peers(rail));
  }
}

void Exchange::close(bool failed) {
  OpenLanes lanes{std::move(lanes_.scatter), std::move(lanes_.gather),
                  std::move(lanes_.commit),  std::move(lanes_.local_scatter),
                  std::move(lanes_.forward), std::move(lanes_.hashes)};
  if (failed) close_later(std::move(lanes));
}

void Exchange::wait(const Pending& work, Phase phase, uint64_t step, uint64_t number) const {
  try {
    peers_.wait(*work);
  } catch (const std::exception& error) {
    throw peers_.cause(phase, step, number, error.what());
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

// --- siblings: gradients

uint64_t Exchange::dense_bytes(const Chunk& chunk, uint32_t local_index) const {
  const auto& rails = chunk.plan->rails;
  const uint64_t elements =
      local_index < rails.size() ? rails[local_index].num_elements : uint64_t{0};
  return elements * item_bytes(chunk.plan->dtype);
}

uint64_t Exchange::dense_message_bytes(const Chunk& chunk, uint32_t local_index) const {
  return kHeaderBytes + (siblings_share(*chunk.slot) ? 0 : dense_bytes(chunk, local_index));
}

std::byte* Exchange::dense_place(const Slot& slot, uint32_t sibling, uint32_t rail) const {
  const uint64_t among_others = sibling < rail ? sibling : sibling - 1;
  const uint64_t place = rail * (siblings_.size() - 1) + among_others;
  return bytes(slot.dense_shared) + place * slot.dense_place_bytes;
}

std::byte* Exchange::dense_message(const Chunk& chunk, uint32_t rail) const {
  if (siblings_share(*chunk.slot)) return dense_place(*chunk.slot, local_index_, rail);
  uint64_t offset = kHeaderBytes;
  for (uint32_t i = 0; i < rail; ++i) offset += dense_message_bytes(chunk, i);
  return bytes(chunk.slot->dense_send) + offset;
}

// The numbers have no checksum: they do not leave the machine.
void Exchange::post_local_scatter(Chunk& chunk, WireStatus status) {
  std::vector<int64_t> send_bytes;
  int64_t sent = 0;
  uint64_t given = 0;  // through memory or the lane
  for (uint32_t i = 0; i < siblings_.size(); ++i) {
    const uint64_t dense = dense_bytes(chunk, i);
    if (i != local_index_) given += kHeaderBytes + dense;
    write_header(bytes(chunk.slot->dense_send) + sent, envelope(chunk, Phase::kLocalScatter),
                 status, static_cast<uint32_t>(dense), 0);
    send_bytes.push_back(static_cast<int64_t>(dense_message_bytes(chunk, i)));
    sent += send_bytes.back();
  }
  const int64_t mine = send_bytes[local_index_];
  count(0, given);
  const auto number = static_cast<int64_t>(siblings_.size());
  chunk.local_scatter = lanes_.local_scatter->all_to_all(
      chunk.slot->dense_receive.narrow(0, 0, mine * number), std::vector<int64_t>(number, mine),
      chunk.slot->dense_send.narrow(0, 0, sent), send_bytes);
}

const std::byte* Exchange::scattered_gradients(const Chunk& chunk, uint32_t sibling) const {
  if (siblings_share(*chunk.slot)) return dense_place(*chunk.slot, sibling, local_index_);
  const uint64_t stride = dense_message_bytes(chunk, local_index_);
  return bytes(chunk.slot->dense_receive) + sibling * stride + kHeaderBytes;
}

Fault Exchange::wait_local_scatter(Chunk& chunk) {
  wait(chunk.local_scatter, Phase::kLocalScatter, chunk.step, chunk.number);
  chunk.local_scatter.reset();
  const auto dense = static_cast<uint32_t>(dense_bytes(chunk, local_index_));
  const uint64_t stride = dense_message_bytes(chunk, local_index_);
  for (uint32_t i = 0; i < siblings_.size(); ++i) {
    if (i == local_index_) continue;
    const Fault fault =
        check_unsummed_message(bytes(chunk.slot->dense_receive) + i * stride,
                               envelope(chunk, Phase::kLocalScatter), siblings_[i], dense);
    if (fault) return fault;
  }
  return {};
}

// --- peers: payloads

// One message to every owner.
void Exchange::post_scatter(Chunk& chunk, WireStatus status,
                            const std::vector<uint64_t>& checksums) {
  const auto& shards = chunk.plan->shards;
  std::vector<int64_t> send_bytes(shards.size());
  const int64_t mine = shards[node_].scatter_bytes;
  const std::vector<int64_t> receive_bytes(shards.size(), mine);
  int64_t offset = 0;
  for (uint32_t node = 0; node < shards.size(); ++node) {
    send_bytes[node] = shards[node].scatter_bytes;
    if (send_bytes[node] == 0) continue;
    write_header(bytes(chunk.slot->scatter_send) + offset, envelope(chunk, Phase::kScatter), status,
                 shards[node].worker_bytes, checksums[node]);
    offset += send_bytes[node];
  }
  count(static_cast<uint64_t>(offset - mine), 0);
  chunk.scatter = lanes_.scatter->all_to_all(
      chunk.slot->scatter_receive.narrow(0, 0, mine * static_cast<int64_t>(shards.size())),
      receive_bytes, chunk.slot->scatter_send.narrow(0, 0, offset), send_bytes);
}

Fault Exchange::wait_scatter(Chunk& chunk) {
  wait(chunk.scatter, Phase::kScatter, chunk.step, chunk.number);
  chunk.scatter.reset();
  const Shard& own = chunk.plan->shards[node_];
  for (uint32_t node = 0; node < nodes_.num_nodes(); ++node) {
    if (node == node_ || own.scatter_bytes == 0) continue;
    const Fault fault = check_message(scattered_payload(chunk, node) - kHeaderBytes,
                                      envelope(chunk, Phase::kScatter), rails_[local_index_][node],
                                      own.worker_bytes);
    if (fault) return fault;
  }
  return {};
}

// Its own is where it was written: lanes need not copy it.
const std::byte* Exchange::scattered_payload(const Chunk& chunk, uint32_t node) const {
  const auto& shards = chunk.plan->shards;
  if (node == node_) {
    uint64_t offset = kHeaderBytes;
    for (uint32_t p = 0; p < node; ++p) offset += shards[p].scatter_bytes;
    return bytes(chunk.slot->scatter_send) + offset;
  }
  const uint64_t stride = shards[node_].scatter_bytes;
  return bytes(chunk.slot->scatter_receive) + node * stride + kHeaderBytes;
}

std::byte* Exchange::gather_message(const Chunk& chunk) const {
  const Slot& slot = *chunk.slot;
  return slot.own_message.defined() ? bytes(slot.own_message) : own_place(chunk);
}

void Exchange::count(uint64_t to_peers, uint64_t to_siblings) {
  sent_bytes_.fetch_add(to_peers, std::memory_order_relaxed);
  local_bytes_.fetch_add(to_siblings, std::memory_order_relaxed);
}

Pending Exchange::post_to_all(Lane& lane, const at::Tensor& messages) {
  const int64_t size = messages.numel() / lane.world_size();
  count(size * (nodes_.world_size() - siblings_.size()), size * (siblings_.size() - 1));
  return lane.all_gather(messages, std::vector<int64_t>(lane.world_size(), size),
                         messages.narrow(0, size * lane.rank(), size));
}

void Exchange::post_gather(Chunk& chunk, WireStatus status, uint64_t checksum) {
  const Gathered& own = own_gathered(chunk);
  std::vector<int64_t> sizes;
  int64_t total = 0;
  for (const Gathered& message : chunk.plan->rails[local_index_].gathered) {
    total += sizes.emplace_back(message.message_bytes);
  }
  if (own.message_bytes != 0) {
    write_header(gather_message(chunk), envelope(chunk, Phase::kGather), status, own.payload_bytes,
                 checksum);
  }
  const Slot& slot = *chunk.slot;
  const int64_t begin = chunk.plan->rails[local_index_].gathered.front().start;
  count(uint64_t{own.message_bytes} * (nodes_.num_nodes() - 1), 0);
  chunk.gather = lanes_.gather->all_gather(
      chunk.gathered.narrow(0, begin, total), sizes,
      slot.own_message.defined() ? slot.own_message.narrow(0, 0, own.message_bytes)
                                 : chunk.gathered.narrow(0, own.start, own.message_bytes));
}

Fault Exchange::wait_gather(Chunk& chunk) {
  wait(chunk.gather, Phase::kGather, chunk.step, chunk.number);
  chunk.gather.reset();
  // Lanes need not put it there.
  if (chunk.slot->own_message.defined()) {
    std::memcpy(own_place(chunk), gather_message(chunk), own_gathered(chunk).message_bytes);
  }
  return check_gathered(chunk, local_index_);
}

// This rank's own message needs no check.
Fault Exchange::check_gathered(const Chunk& chunk, uint32_t rail) const {
  for (uint32_t node = 0; node < nodes_.num_nodes(); ++node) {
    const uint32_t source = rails_[rail][node];
    const Gathered& message = chunk.plan->rails[rail].gathered[node];
    if (source == agreement_.rank || message.message_bytes == 0) continue;
    const Fault fault =
        check_message(bytes(chunk.gathered) + message.start, envelope(chunk, Phase::kGather),
                      source, message.payload_bytes);
    if (fault) return fault;
  }
  return {};
}

// --- siblings: what was gathered

// Shared memory has what was gathered where decode reads it. The headers then travel where those of
// the local scatter came, which were checked.
Exchange::Forwarded Exchange::forwarded(const Chunk& chunk) const {
  const Slot& slot = *chunk.slot;
  const bool share = siblings_share(slot);
  Forwarded forwarded;
  int64_t total = 0;
  for (uint32_t i = 0; i < siblings_.size(); ++i) {
    if (i == local_index_) forwarded.own_start = total;
    total += forwarded.sizes.emplace_back(share ? int64_t{kHeaderBytes}
                                                : int64_t{chunk.plan->forward[i].message_bytes});
  }
  forwarded.messages = (share ? slot.dense_receive : chunk.gathered).narrow(0, 0, total);
  return forwarded;
}

void Exchange::post_forward(Chunk& chunk, WireStatus status) {
  const uint32_t forward_bytes = chunk.plan->forward[local_index_].message_bytes;
  const auto [messages, sizes, own_start] = forwarded(chunk);
  const at::Tensor own = messages.narrow(0, own_start, sizes[local_index_]);
  write_header(bytes(own), envelope(chunk, Phase::kForward), status, forward_bytes - kHeaderBytes,
               0);
  count(0, uint64_t{forward_bytes} * (siblings_.size() - 1));
  chunk.forward = lanes_.forward->all_gather(messages, sizes, own);
}

// Headers and checksums of other rails' messages are those of their owners.
Fault Exchange::wait_forward(Chunk& chunk) {
  wait(chunk.forward, Phase::kForward, chunk.step, chunk.number);
  chunk.forward.reset();
  const auto [messages, sizes, own_start] = forwarded(chunk);
  const std::byte* message = bytes(messages);
  for (uint32_t i = 0; i < siblings_.size(); message += sizes[i++]) {
    if (i == local_index_) continue;
    Fault fault = check_unsummed_message(message, envelope(chunk, Phase::kForward), siblings_[i],
                                         chunk.plan->forward[i].message_bytes - kHeaderBytes);
    if (!fault && i < nodes_.num_rails()) fault = check_gathered(chunk, i);
    if (fault) return fault;
  }
  return {};
}

// --- all ranks

Pending Exchange::post_commit(const at::Tensor& commits, uint64_t step, uint64_t bucket,
                              const Fault& fault, const UsedMap& used, float loss_scale) {
  write_commit(bytes(commits) + agreement_.rank * commit_bytes(used.size()), agreement_.rank, step,
               bucket, fault, used, loss_scale);
  return post_to_all(*lanes_.commit, commits);
}

// The calling thread owns that lane, and posts nothing else meanwhile.
Fault Exchange::gather_hashes(const std::vector<uint64_t>& hashes, uint64_t step,
                              uint64_t next_chunk, std::vector<std::vector<uint64_t>>& by_rank) {
  const auto size = static_cast<int64_t>(hash_message_bytes(hashes.size()));
  const auto options = at::TensorOptions().dtype(at::kByte);
  const at::Tensor receive = at::zeros({size * agreement_.world_size}, options);
  write_hashes(agreement_, step, next_chunk, hashes, bytes(receive) + size * agreement_.rank);
  wait(post_to_all(*lanes_.hashes, receive), Phase::kParameters, step, next_chunk);
  return read_hashes(agreement_, step, next_chunk, bytes(receive), hashes.size(), by_rank);
}

}  // namespace gradferry
