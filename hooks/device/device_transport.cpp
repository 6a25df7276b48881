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

Pending DeviceTransport::post_all_to_all(Lane& lane, const at::Tensor& receive,
                                         const std::vector<int64_t>& receive_bytes,
                                         const at::Tensor& send,
                                         const std::vector<int64_t>& send_bytes) {
  sent_bytes_.fetch_add(static_cast<uint64_t>(sum(send_bytes) - send_bytes[lane.rank()]),
                        std::memory_order_relaxed);
  return lane.all_to_all(first_bytes(receive, sum(receive_bytes)), receive_bytes,
                         first_bytes(send, sum(send_bytes)), send_bytes);
}

Pending DeviceTransport::post_all_gather(Lane& lane, const at::Tensor& receive,
                                         const at::Tensor& send, int64_t num_bytes) {
  sent_bytes_.fetch_add(static_cast<uint64_t>(num_bytes) * (world_size_ - 1),
                        std::memory_order_relaxed);
  return lane.all_gather(first_bytes(receive, num_bytes * world_size_),
                         first_bytes(send, num_bytes));
}

// --- StreamTransport ---

void StreamTransport::begin_bucket() { lane_.emplace(find_group_(), clean_); }

namespace {

Transfer transfer_of(Pending work, const c10::Stream& stream) {
  Transfer transfer;
  transfer.work = std::move(work);
  if (!transfer.work) transfer.done.emplace(stream.device_type()).record(stream);
  return transfer;
}

}  // namespace

Transfer StreamTransport::all_to_all(const DeviceBuffer& receive,
                                     const std::vector<int64_t>& receive_bytes,
                                     const DeviceBuffer& send,
                                     const std::vector<int64_t>& send_bytes,
                                     const c10::Stream& stream) {
  const c10::StreamGuard guard(stream);
  return transfer_of(
      post_all_to_all(*lane_, receive.device, receive_bytes, send.device, send_bytes), stream);
}

Transfer StreamTransport::all_gather(const DeviceBuffer& receive, const DeviceBuffer& send,
                                     int64_t num_bytes, const c10::Stream& stream) {
  const c10::StreamGuard guard(stream);
  return transfer_of(post_all_gather(*lane_, receive.device, send.device, num_bytes), stream);
}

void StreamTransport::wait(Transfer& transfer, const c10::Stream& stream) {
  if (transfer.done) transfer.done->block(stream);
  if (!transfer.work) return;
  const c10::StreamGuard guard(stream);
  transfer.work->wait();
  transfer.work.reset();
}

// --- StagedTransport ---

Transfer StagedTransport::all_to_all(const DeviceBuffer& receive,
                                     const std::vector<int64_t>& receive_bytes,
                                     const DeviceBuffer& send,
                                     const std::vector<int64_t>& send_bytes,
                                     const c10::Stream& stream) {
  to_host(send, sum(send_bytes), stream);
  Transfer transfer;
  transfer.work = post_all_to_all(*lane_, receive.host, receive_bytes, send.host, send_bytes);
  transfer.received = &receive;
  transfer.num_bytes = sum(receive_bytes);
  return transfer;
}

Transfer StagedTransport::all_gather(const DeviceBuffer& receive, const DeviceBuffer& send,
                                     int64_t num_bytes, const c10::Stream& stream) {
  to_host(send, num_bytes, stream);
  Transfer transfer;
  transfer.work = post_all_gather(*lane_, receive.host, send.host, num_bytes);
  transfer.received = &receive;
  transfer.num_bytes = num_bytes * world_size_;
  return transfer;
}

void StagedTransport::wait(Transfer& transfer, const c10::Stream& stream) {
  peers_->wait(*transfer.work);
  transfer.work.reset();
  const c10::StreamGuard guard(stream);
  first_bytes(transfer.received->device, transfer.num_bytes)
      .copy_(first_bytes(transfer.received->host, transfer.num_bytes), /*non_blocking=*/true);
}

void StagedTransport::close(bool failed) {
  if (failed) close_later({std::move(lane_)});
  lane_.reset();
}

}  // namespace gradferry
