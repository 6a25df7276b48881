#include "device/device_transport.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <numeric>

namespace gradferry {
namespace {

int64_t sum(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

at::Tensor first_bytes(const at::Tensor& tensor, int64_t num_bytes) {
  return tensor.narrow(0, 0, num_bytes);
}

// Copies the first bytes of `buffer` to its pinned memory and waits for the copy.
void to_host(const DeviceBuffer& buffer, int64_t num_bytes, const c10::Stream& stream) {
  const c10::StreamGuard guard(stream);
  first_bytes(buffer.host, num_bytes)
      .copy_(first_bytes(buffer.device, num_bytes), /*non_blocking=*/true);
  stream.synchronize();
}

}  // namespace

DeviceBuffer DeviceBuffer::part(uint64_t begin, uint64_t num_bytes) const {
  const auto narrowed = [&](const at::Tensor& tensor) {
    return tensor.defined()
               ? tensor.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(num_bytes))
               : tensor;
  };
  return {narrowed(device), narrowed(host)};
}

Lane& DeviceTransport::lane(Among among) {
  if (among == Among::kSiblings) return *nodes_.siblings;
  return among == Among::kPeers && nodes_.peers ? *nodes_.peers : lane_of_all();
}

void DeviceTransport::count(int64_t to_others, int64_t to_siblings) {
  sent_bytes_.fetch_add(static_cast<uint64_t>(to_others), std::memory_order_relaxed);
  local_bytes_.fetch_add(static_cast<uint64_t>(to_siblings), std::memory_order_relaxed);
}

void DeviceTransport::close(bool failed) {
  OpenLanes lanes{take_lane_of_all(), std::move(nodes_.siblings), std::move(nodes_.peers)};
  if (failed) close_later(std::move(lanes));
}

Pending DeviceTransport::post_all_to_all(Among among, const at::Tensor& receive,
                                         const std::vector<int64_t>& receive_bytes,
                                         const at::Tensor& send,
                                         const std::vector<int64_t>& send_bytes) {
  Lane& used = lane(among);
  const int64_t sent = sum(send_bytes) - send_bytes[used.rank()];
  const bool stays = among == Among::kSiblings;
  count(stays ? 0 : sent, stays ? sent : 0);
  return used.all_to_all(first_bytes(receive, sum(receive_bytes)), receive_bytes,
                         first_bytes(send, sum(send_bytes)), send_bytes);
}

Pending DeviceTransport::post_all_gather(Among among, const at::Tensor& receive,
                                         const std::vector<int64_t>& receive_bytes,
                                         const at::Tensor& send) {
  Lane& used = lane(among);
  const int64_t ranks = used.world_size(), num_bytes = receive_bytes[used.rank()];
  // How many of these ranks are on this rank's node, this one included.
  const int64_t on_node =
      among == Among::kPeers || !nodes_.siblings ? 1 : nodes_.siblings->world_size();
  count(num_bytes * (ranks - on_node), num_bytes * (on_node - 1));
  return used.all_gather(first_bytes(receive, sum(receive_bytes)), receive_bytes,
                         first_bytes(send, num_bytes));
}

// --- StreamTransport ---

StreamTransport::StreamTransport(FindGroup group, NodeLanes nodes,
                                 std::optional<c10::Device> chained_on)
    : DeviceTransport(std::move(nodes)), find_group_(std::move(group)) {
  if (!chained_on) return;
  const c10::impl::VirtualGuardImpl guard(chained_on->type());
  chain_.emplace(guard.getStreamFromGlobalPool(*chained_on, /*isHighPriority=*/true),
                 c10::Event(chained_on->type()));
}

void StreamTransport::begin_bucket() { lane_.emplace(find_group_(), clean_); }

Transfer StreamTransport::post_behind(const c10::Stream& stream,
                                      const std::function<Pending()>& post) {
  if (chain_) {
    chain_->enqueued.record(stream);
    chain_->enqueued.block(chain_->stream);
  }
  const c10::Stream& from = chain_ ? chain_->stream : stream;
  const c10::StreamGuard guard(from);
  Transfer transfer;
  transfer.work = post();
  if (!transfer.work) {
    transfer.done.emplace(from.device_type()).record(from);
  } else if (chain_) {
    transfer.work->wait();
  }
  return transfer;
}

Transfer StreamTransport::all_to_all(Among among, const DeviceBuffer& receive,
                                     const std::vector<int64_t>& receive_bytes,
                                     const DeviceBuffer& send,
                                     const std::vector<int64_t>& send_bytes,
                                     const c10::Stream& stream) {
  return post_behind(stream, [&] {
    return post_all_to_all(among, receive.device, receive_bytes, send.device, send_bytes);
  });
}

Transfer StreamTransport::all_gather(Among among, const DeviceBuffer& receive,
                                     const std::vector<int64_t>& receive_bytes,
                                     const DeviceBuffer& send, const c10::Stream& stream) {
  return post_behind(
      stream, [&] { return post_all_gather(among, receive.device, receive_bytes, send.device); });
}

void StreamTransport::wait(Transfer& transfer, const c10::Stream& stream) {
  if (transfer.done) transfer.done->block(stream);
  if (!transfer.work) return;
  const c10::StreamGuard guard(stream);
  transfer.work->wait();
  transfer.work.reset();
}

// --- StagedTransport ---

Transfer StagedTransport::all_to_all(Among among, const DeviceBuffer& receive,
                                     const std::vector<int64_t>& receive_bytes,
                                     const DeviceBuffer& send,
                                     const std::vector<int64_t>& send_bytes,
                                     const c10::Stream& stream) {
  to_host(send, sum(send_bytes), stream);
  return {.work = post_all_to_all(among, receive.host, receive_bytes, send.host, send_bytes),
          .done = {},
          .received = receive,
          .num_bytes = sum(receive_bytes)};
}

Transfer StagedTransport::all_gather(Among among, const DeviceBuffer& receive,
                                     const std::vector<int64_t>& receive_bytes,
                                     const DeviceBuffer& send, const c10::Stream& stream) {
  to_host(send, receive_bytes[lane(among).rank()], stream);
  return {.work = post_all_gather(among, receive.host, receive_bytes, send.host),
          .done = {},
          .received = receive,
          .num_bytes = sum(receive_bytes)};
}

void StagedTransport::wait(Transfer& transfer, const c10::Stream& stream) {
  peers_->wait(*transfer.work);
  transfer.work.reset();
  const c10::StreamGuard guard(stream);
  first_bytes(transfer.received.device, transfer.num_bytes)
      .copy_(first_bytes(transfer.received.host, transfer.num_bytes), /*non_blocking=*/true);
}

}  // namespace gradferry
