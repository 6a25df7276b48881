// A lane: an ordered queue of collectives, on connections that one attach has to itself, or on
// DDP's own process group. Collectives pair up by the order in which they were posted, so each lane
// has exactly one posting thread; any thread may wait for what it posted. The Exchange of a
// host or the DeviceTransport owns lanes, until its engine ends or fails (`close_later`).
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "torch_compat.h"

namespace gradferry {

// A tensor's memory as bytes, wherever it lies.
inline std::byte* bytes(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

// A collective in flight. Holds its tensors until a thread waits for it.
using Pending = c10::intrusive_ptr<c10d::Work>;

class Lane {
 public:
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // uint8 tensors, contiguous, one dimension. Rank p's part of `send` has send_bytes[p] bytes, its
  // part of `receive` receive_bytes[p]; all ranks give the same send_bytes. A part of no bytes is
  // not sent. A lane may or may not copy this rank's own part.
  virtual Pending all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes,
                             at::Tensor send, std::vector<int64_t> send_bytes) = 0;
  // Every rank sends `send` to all; rank p's part of `receive` has receive_bytes[p] bytes, which
  // all ranks give alike. `send` is this rank's place in `receive`, or elsewhere; then a lane may
  // or may not copy it there.
  virtual Pending all_gather(at::Tensor receive, std::vector<int64_t> receive_bytes,
                             at::Tensor send) = 0;

  virtual uint32_t rank() const = 0;
  virtual uint32_t world_size() const = 0;

 protected:
  Lane() = default;
};

// The lanes of an engine; some may be null.
using OpenLanes = std::array<std::shared_ptr<Lane>, 6>;

// Destroys lanes after a failure: after a delay, on a detached thread. What is in flight ends when
// the peers close their lanes, at the latest after the timeout of the process group. The delay is
// needed because closing a connection may discard data that a slower peer has not read yet. Without
// memory for that they are closed at once: the threads that call this could tell nobody.
void close_later(OpenLanes lanes) noexcept;

// The thread-local state of a thread that never ran Python. A Work posted under it holds no Python
// objects, so that destroying it needs no GIL.
at::ThreadLocalState thread_state_without_python();

// What of torch's a lane posts on. Only the operations of a ProcessGroup pass by torch's flight
// recorder, NaN check and other hooks.
using Carrier =
    std::variant<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::ProcessGroup>>;

// On a backend or process group of torch's. The destructor of a backend joins its threads, which
// may wait for peers.
class CarrierLane final : public Lane {
 public:
  // `clean`: thread_state_without_python().
  CarrierLane(Carrier carrier, std::shared_ptr<const at::ThreadLocalState> clean);

  Pending all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes, at::Tensor send,
                     std::vector<int64_t> send_bytes) override;
  Pending all_gather(at::Tensor receive, std::vector<int64_t> receive_bytes,
                     at::Tensor send) override;
  uint32_t rank() const override { return rank_; }
  uint32_t world_size() const override { return world_size_; }

 private:
  Carrier carrier_;
  uint32_t rank_, world_size_;
  std::shared_ptr<const at::ThreadLocalState> clean_;
};

}  // namespace gradferry
