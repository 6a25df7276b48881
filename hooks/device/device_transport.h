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

  // `num_bytes` from `begin` on, in the same memory.
  DeviceBuffer part(uint64_t begin, uint64_t num_bytes) const;
};

// In device memory, for kernels; the host must not dereference it.
inline std::byte* bytes(const DeviceBuffer& buffer) { return bytes(buffer.device); }

// Which ranks take part in a collective.
enum class Among : uint8_t { kAll, kPeers, kSiblings };

// The lanes of a rank whose node has several: between its siblings, and between its peers if it has
// any.
struct NodeLanes {
  std::shared_ptr<Lane> siblings, peers;
};

// A collective in flight.
struct Transfer {
  Pending work;                    // null: it runs on the stream it was posted from
  std::optional<c10::Event> done;  // recorded after it, if `work` is null
  DeviceBuffer received;           // staged: buffer to copy back to the device
  int64_t num_bytes = 0;
};

class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;
  DeviceTransport(const DeviceTransport&) = delete;
  DeviceTransport& operator=(const DeviceTransport&) = delete;

  // Whether its calls wait on the host.
  virtual bool waits() const = 0;

  // Call these before and after the collectives of one bucket.
  virtual void begin_bucket() {}
  virtual void end_bucket() {}

  // Runs after the work that is enqueued on `stream`. Rank p's part of `send` has send_bytes[p]
  // bytes; the parts are contiguous, and so are those received. Among peers or siblings.
  virtual Transfer all_to_all(Among among, const DeviceBuffer& receive,
                              const std::vector<int64_t>& receive_bytes, const DeviceBuffer& send,
                              const std::vector<int64_t>& send_bytes,
                              const c10::Stream& stream) = 0;
  // Every rank sends the first bytes of `send`, which may lie in its place of `receive`; that gets
  // receive_bytes[p] of rank p.
  virtual Transfer all_gather(Among among, const DeviceBuffer& receive,
                              const std::vector<int64_t>& receive_bytes, const DeviceBuffer& send,
                              const c10::Stream& stream) = 0;
  // Work enqueued on `stream` from now on runs after the collective.
  virtual void wait(Transfer& transfer, const c10::Stream& stream) = 0;

  // The last call. After a failure lanes are closed later, as in close_later().
  void close(bool failed);
  // Instead: keeps the lanes for good.
  void leak() { static_cast<void>(new NodeLanes(std::move(nodes_))); }

  // What this rank sent to ranks of other nodes, and to its siblings.
  uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }
  uint64_t local_bytes() const { return local_bytes_.load(std::memory_order_relaxed); }

 protected:
  // `nodes`: both null with one rank per node, where all ranks are peers.
  explicit DeviceTransport(NodeLanes nodes) : nodes_(std::move(nodes)) {}

  Lane& lane(Among among);
  Pending post_all_to_all(Among among, const at::Tensor& receive,
                          const std::vector<int64_t>& receive_bytes, const at::Tensor& send,
                          const std::vector<int64_t>& send_bytes);
  Pending post_all_gather(Among among, const at::Tensor& receive,
                          const std::vector<int64_t>& receive_bytes, const at::Tensor& send);

 private:
  virtual Lane& lane_of_all() = 0;
  virtual std::shared_ptr<Lane> take_lane_of_all() { return {}; }
  void count(int64_t to_others, int64_t to_siblings);

  NodeLanes nodes_;
  std::atomic<uint64_t> sent_bytes_{0}, local_bytes_{0};
};

class StreamTransport final : public DeviceTransport {
 public:
  // `group` returns DDP's own process group. It is called for every bucket and its result not kept,
  // so that the group can be destroyed.
  using FindGroup = std::function<c10::intrusive_ptr<c10d::ProcessGroup>()>;
  // `chained_on`: the device, if each collective is to begin when the one before it is done,
  // whatever their lanes; for lanes whose collectives the device may start in another order.
  StreamTransport(FindGroup group, NodeLanes nodes, std::optional<c10::Device> chained_on);

  bool waits() const override { return false; }
  void begin_bucket() override;
  void end_bucket() override { lane_.reset(); }
  Transfer all_to_all(Among among, const DeviceBuffer& receive,
                      const std::vector<int64_t>& receive_bytes, const DeviceBuffer& send,
                      const std::vector<int64_t>& send_bytes, const c10::Stream& stream) override;
  Transfer all_gather(Among among, const DeviceBuffer& receive,
                      const std::vector<int64_t>& receive_bytes, const DeviceBuffer& send,
                      const c10::Stream& stream) override;
  void wait(Transfer& transfer, const c10::Stream& stream) override;

 private:
  Lane& lane_of_all() override { return *lane_; }
  Transfer post_behind(const c10::Stream& stream, const std::function<Pending()>& post);

  // The stream from which all collectives are posted. It waits for each before the next.
  struct Chain {
    c10::Stream stream;
    c10::Event enqueued;  // what the next one sends; reused
  };

  FindGroup find_group_;
  std::optional<Chain> chain_;
  const std::shared_ptr<const at::ThreadLocalState> clean_ =
      std::make_shared<const at::ThreadLocalState>(thread_state_without_python());
  std::optional<CarrierLane> lane_;  // while a bucket is posted
};

class StagedTransport final : public DeviceTransport {
 public:
  // `lane`: separate from DDP's connections.
  StagedTransport(std::shared_ptr<Lane> lane, NodeLanes nodes, std::shared_ptr<Peers> peers)
      : DeviceTransport(std::move(nodes)), lane_(std::move(lane)), peers_(std::move(peers)) {}

  bool waits() const override { return true; }
  Transfer all_to_all(Among among, const DeviceBuffer& receive,
                      const std::vector<int64_t>& receive_bytes, const DeviceBuffer& send,
                      const std::vector<int64_t>& send_bytes, const c10::Stream& stream) override;
  Transfer all_gather(Among among, const DeviceBuffer& receive,
                      const std::vector<int64_t>& receive_bytes, const DeviceBuffer& send,
                      const c10::Stream& stream) override;
  void wait(Transfer& transfer, const c10::Stream& stream) override;

 private:
  Lane& lane_of_all() override { return *lane_; }
  std::shared_ptr<Lane> take_lane_of_all() override { return std::move(lane_); }

  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Peers> peers_;
};

}  // namespace gradferry
