// A lane: an ordered queue of collectives, on a gloo backend built for one attach, or on DDP's own
// process group. Both pair collectives by the order in which they are posted, so each lane has
// exactly one posting thread.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <variant>
#include <vector>

#include "torch_compat.h"

namespace gradferry {

// A collective in flight. Holds its tensors until a thread waits for it.
using Pending = c10::intrusive_ptr<c10d::Work>;

// The thread-local state of a thread that never ran Python. A Work posted under it holds no Python
// objects, so that destroying it needs no GIL.
at::ThreadLocalState thread_state_without_python();

// Where a lane posts. Only the operations of a ProcessGroup pass by torch's flight recorder, NaN
// check and other hooks.
using Carrier =
    std::variant<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::ProcessGroup>>;

class Lane {
 public:
  // `clean`: thread_state_without_python(). `sent_bytes` counts what this rank sends to others.
  Lane(Carrier carrier, const at::ThreadLocalState& clean, std::atomic<uint64_t>& sent_bytes);

  // uint8 tensors, contiguous, one dimension; rank p's part of `send` has send_bytes[p] bytes.
  Pending all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes, at::Tensor send,
                     std::vector<int64_t> send_bytes);
  // Every rank sends `send`; `receive` holds world_size times as much.
  Pending all_gather(at::Tensor receive, at::Tensor send);

  // Destroys the backend that was built for the lane. Only when nothing is in flight: its
  // destructor joins its threads.
  void close() { own_backend().reset(); }
  // After a failure: the same after a delay, on a detached thread. What is in flight ends when the
  // peers close their lanes, at the latest after the timeout of the process group. The delay is
  // needed because closing a connection may discard data that a slower peer has not read yet.
  void close_later();

 private:
  c10::intrusive_ptr<c10d::Backend>& own_backend() {
    return std::get<c10::intrusive_ptr<c10d::Backend>>(carrier_);
  }

  Carrier carrier_;
  size_t rank_;
  uint64_t world_size_;
  const at::ThreadLocalState& clean_;
  std::atomic<uint64_t>& sent_bytes_;
};

}  // namespace gradferry
