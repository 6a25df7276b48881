// How packed bytes in device memory reach other ranks, in the order of streams.
//
//   StreamTransport   a backend that enqueues its collectives (NCCL): nothing waits on the host
//   StagedTransport   a backend for host memory (gloo): bytes pass through pinned memory. Its calls
//                     block the host, so a separate thread must make them
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "lane.h"
#include "peers.h"

namespace gradferry {

// uint8 of one dimension. `host` is pinned memory of the same size, only for a staged transport.
struct DeviceBuffer {
  at::Tensor device;
  at::Tensor host;
};

// A collective in flight.
struct Transfer {
  Pending work;                            // null: it runs on the stream it was posted from
  std::optional<c10::Event> done;          // recorded after it, if `work` is null
  const DeviceBuffer* received = nullptr;  // staged: buffer to copy back to the device
  int64_t num_bytes = 0;
};

class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;

  // Whether its calls wait on the host.
  virtual bool waits() const = 0;

  // Call these before and after the collectives of one bucket.
  virtual void begin_bucket() {}
  virtual void end_bucket() {}

  // Runs after the work that is enqueued on `stream`. Rank p's part of `send` has send_bytes[p]
  // bytes; the parts are contiguous, and so are those received.
  virtual Transfer all_to_all(const DeviceBuffer& receive,
                              const std::vector<int64_t>& receive_bytes, const DeviceBuffer& send,
                              const std::vector<int64_t>& send_bytes,
                              const c10::Stream& stream) = 0;
  // Every rank sends the first `num_bytes` of `send`; `receive` gets world_size times as many.
  virtual Transfer all_gather(const DeviceBuffer& receive, const DeviceBuffer& send,
                              int64_t num_bytes, const c10::Stream& stream) = 0;
  // Work enqueued on `stream` from now on runs after the collective.
  virtual void wait(Transfer& transfer, const c10::Stream& stream) = 0;

  // The last call. After a failure the backend is closed later, as in Lane::close_later().
  virtual void close(bool failed) = 0;

  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }

 protected:
  explicit DeviceTransport(uint32_t world_size) : world_size_(world_size) {}

  Pending post_all_to_all(Lane& lane, const at::Tensor& receive,
                          const std::vector<int64_t>& receive_bytes, const at::Tensor& send,
                          const std::vector<int64_t>& send_bytes);
  Pending post_all_gather(Lane& lane, const at::Tensor& receive, const at::Tensor& send,
                          int64_t num_bytes);

  const uint32_t world_size_;
  std::atomic<uint64_t> sent_bytes_{0};
};

class StreamTransport final : public DeviceTransport {
 public:
  // `group` returns DDP's own process group. It is called for every bucket and its result not kept,
  // so that the group can be destroyed.
  using FindGroup = std::function<c10::intrusive_ptr<c10d::ProcessGroup>()>;
  StreamTransport(FindGroup group, uint32_t world_size)
      : DeviceTransport(world_size), find_group_(std::move(group)) {}

  bool waits() const override { return false; }
  void begin_bucket() override;
  void end_bucket() override { lane_.reset(); }
  Transfer all_to_all(const DeviceBuffer& receive, const std::vector<int64_t>& receive_bytes,
                      const DeviceBuffer& send, const std::vector<int64_t>& send_bytes,
                      const c10::Stream& stream) override;
  Transfer all_gather(const DeviceBuffer& receive, const DeviceBuffer& send, int64_t num_bytes,
                      const c10::Stream& stream) override;
  void wait(Transfer& transfer, const c10::Stream& stream) override;
  void close(bool /*failed*/) override {}

 private:
  FindGroup find_group_;
  const std::shared_ptr<const at::ThreadLocalState> clean_ =
      std::make_shared<const at::ThreadLocalState>(thread_state_without_python());
  std::optional<CarrierLane> lane_;  // while a bucket is posted
};

class StagedTransport final : public DeviceTransport {
 public:
  // `lane`: separate from DDP's connections.
  StagedTransport(std::shared_ptr<Lane> lane, std::shared_ptr<Peers> peers)
      : DeviceTransport(lane->world_size()), lane_(std::move(lane)), peers_(std::move(peers)) {}

  bool waits() const override { return true; }
  Transfer all_to_all(const DeviceBuffer& receive, const std::vector<int64_t>& receive_bytes,
                      const DeviceBuffer& send, const std::vector<int64_t>& send_bytes,
                      const c10::Stream& stream) override;
  Transfer all_gather(const DeviceBuffer& receive, const DeviceBuffer& send, int64_t num_bytes,
                      const c10::Stream& stream) override;
  void wait(Transfer& transfer, const c10::Stream& stream) override;
  void close(bool failed) override;

 private:
  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Peers> peers_;
};

}  // namespace gradferry
