#include "host/exchange.h"

#include <ATen/ops/from_blob.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <span>
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
  slot.gathered = untouched_zeros(workspace.gathered_bytes);
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
    const std::string why = error.what();
    throw Unfinished([=, this] { return peers_.cause(phase, step, number, why); });
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

std::vector<int64_t> Exchange::on_lane(const Chunk& chunk,
                                       const std::vector<PlannedMessage>& all) const {
  if (siblings_share(*chunk.slot)) return std::vector<int64_t>(siblings_.size(), kHeaderBytes);
  return sizes_of(std::span(all).first(siblings_.size()));
}

std::byte* Exchange::dense_place(const Slot& slot, uint32_t sibling, uint32_t rail) const {
  const uint64_t among_others = sibling < rail ? sibling : sibling - 1;
  const uint64_t place = rail * (siblings_.size() - 1) + among_others;
  return bytes(slot.dense_shared) + place * slot.dense_place_bytes;
}

std::byte* Exchange::dense_message(const Chunk& chunk, uint32_t rail) const {
  if (siblings_share(*chunk.slot)) return dense_place(*chunk.slot, local_index_, rail);
  return bytes(chunk.slot->dense_send) + chunk.plan->dense[rail].start + kHeaderBytes;
}

// The numbers have no checksum: they do not leave the machine.
void Exchange::post_local_scatter(Chunk& chunk, WireStatus status) {
  const std::vector<int64_t> send_bytes = on_lane(chunk, chunk.plan->dense);
  int64_t sent = 0;
  uint64_t given = 0;  // through memory or the lane
  for (uint32_t i = 0; i < siblings_.size(); ++i) {
    const PlannedMessage& message = chunk.plan->dense[i];
    if (i != local_index_) given += message.message_bytes;
    write_header(bytes(chunk.slot->dense_send) + sent, envelope(chunk, Phase::kLocalScatter),
                 status, message.payload_bytes, 0);
    sent += send_bytes[i];
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
  const uint64_t stride = chunk.plan->dense[local_index_].message_bytes;
  return bytes(chunk.slot->dense_receive) + sibling * stride + kHeaderBytes;
}

Fault Exchange::wait_local_scatter(Chunk& chunk) {
  wait(chunk.local_scatter, Phase::kLocalScatter, chunk.step, chunk.number);
  chunk.local_scatter.reset();
  const uint32_t dense = chunk.plan->dense[local_index_].payload_bytes;
  const int64_t stride = on_lane(chunk, chunk.plan->dense)[local_index_];
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
  const auto& messages = chunk.plan->scattered;
  for (uint32_t node = 0; node < messages.size(); ++node) {
    const PlannedMessage& message = messages[node];
    if (message.message_bytes == 0) continue;
    write_header(bytes(chunk.slot->scatter_send) + message.start, envelope(chunk, Phase::kScatter),
                 status, message.payload_bytes, checksums[node]);
  }
  const int64_t mine = messages[node_].message_bytes, all = total_bytes(messages);
  count(static_cast<uint64_t>(all - mine), 0);
  chunk.scatter = lanes_.scatter->all_to_all(
      chunk.slot->scatter_receive.narrow(0, 0, mine * static_cast<int64_t>(messages.size())),
      std::vector<int64_t>(messages.size(), mine), chunk.slot->scatter_send.narrow(0, 0, all),
      sizes_of(messages));
}

Fault Exchange::wait_scatter(Chunk& chunk) {
  wait(chunk.scatter, Phase::kScatter, chunk.step, chunk.number);
  chunk.scatter.reset();
  const PlannedMessage& own = chunk.plan->scattered[node_];
  for (uint32_t node = 0; node < nodes_.num_nodes() && own.message_bytes != 0; ++node) {
    if (node == node_) continue;
    const Fault fault = check_message(scattered_payload(chunk, node) - kHeaderBytes,
                                      envelope(chunk, Phase::kScatter), rails_[local_index_][node],
                                      own.payload_bytes);
    if (fault) return fault;
  }
  return {};
}

// Its own is where it was written: lanes need not copy it.
const std::byte* Exchange::scattered_payload(const Chunk& chunk, uint32_t node) const {
  const PlannedMessage& own = chunk.plan->scattered[node_];
  if (node == node_) return bytes(chunk.slot->scatter_send) + own.start + kHeaderBytes;
  return bytes(chunk.slot->scatter_receive) + uint64_t{node} * own.message_bytes + kHeaderBytes;
}

std::byte* Exchange::gather_message(const Chunk& chunk) const {
  return bytes(chunk.gathered) + own_gathered(chunk).start;
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
  const auto& messages = chunk.plan->rails[local_index_].gathered;
  const PlannedMessage& own = own_gathered(chunk);
  if (own.message_bytes != 0) {
    write_header(gather_message(chunk), envelope(chunk, Phase::kGather), status, own.payload_bytes,
                 checksum);
  }
  count(uint64_t{own.message_bytes} * (nodes_.num_nodes() - 1), 0);
  chunk.gather = lanes_.gather->all_gather(
      chunk.gathered.narrow(0, messages.front().start, total_bytes(messages)), sizes_of(messages),
      chunk.gathered.narrow(0, own.start, own.message_bytes));
}

Fault Exchange::wait_gather(Chunk& chunk) {
  wait(chunk.gather, Phase::kGather, chunk.step, chunk.number);
  chunk.gather.reset();
  return check_gathered(chunk, local_index_);
}

// This rank's own message needs no check.
Fault Exchange::check_gathered(const Chunk& chunk, uint32_t rail) const {
  for (uint32_t node = 0; node < nodes_.num_nodes(); ++node) {
    const uint32_t source = rails_[rail][node];
    const PlannedMessage& message = chunk.plan->rails[rail].gathered[node];
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
at::Tensor Exchange::forwarded(const Chunk& chunk, const std::vector<int64_t>& sizes) const {
  return (siblings_share(*chunk.slot) ? chunk.slot->dense_receive : chunk.gathered)
      .narrow(0, 0, std::reduce(sizes.begin(), sizes.end()));
}

void Exchange::post_forward(Chunk& chunk, WireStatus status) {
  const PlannedMessage& planned = chunk.plan->forwarded[local_index_];
  const std::vector<int64_t> sizes = on_lane(chunk, chunk.plan->forwarded);
  const at::Tensor messages = forwarded(chunk, sizes);
  const at::Tensor own = messages.split_with_sizes(sizes)[local_index_];
  write_header(bytes(own), envelope(chunk, Phase::kForward), status, planned.payload_bytes, 0);
  count(0, uint64_t{planned.message_bytes} * (siblings_.size() - 1));
  chunk.forward = lanes_.forward->all_gather(messages, sizes, own);
}

// Headers and checksums of other rails' messages are those of their owners.
Fault Exchange::wait_forward(Chunk& chunk) {
  wait(chunk.forward, Phase::kForward, chunk.step, chunk.number);
  chunk.forward.reset();
  const std::vector<int64_t> sizes = on_lane(chunk, chunk.plan->forwarded);
  const std::byte* message = bytes(forwarded(chunk, sizes));
  for (uint32_t i = 0; i < siblings_.size(); message += sizes[i++]) {
    if (i == local_index_) continue;
    Fault fault = check_unsummed_message(message, envelope(chunk, Phase::kForward), siblings_[i],
                                         chunk.plan->forwarded[i].payload_bytes);
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
  try {
    wait(post_to_all(*lanes_.hashes, receive), Phase::kParameters, step, next_chunk);
  } catch (const Unfinished& unfinished) {
    throw unfinished.cause();
  }
  return read_hashes(agreement_, step, next_chunk, bytes(receive), hashes.size(), by_rank);
}

}  // namespace gradferry
