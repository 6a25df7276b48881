#include "lane.h"

#include <pthread.h>

#include <chrono>
#include <optional>
#include <system_error>
#include <thread>

#include "process_end.h"

namespace gradferry {

at::ThreadLocalState thread_state_without_python() {
  std::optional<at::ThreadLocalState> state;
  std::thread([&] { state.emplace(); }).join();
  return *state;
}

Lane::Lane(c10::intrusive_ptr<c10d::Backend> backend, const at::ThreadLocalState& clean,
           std::atomic<uint64_t>& sent_bytes)
    : backend_(std::move(backend)),
      rank_(static_cast<size_t>(backend_->getRank())),
      world_size_(static_cast<uint64_t>(backend_->getSize())),
      clean_(clean),
      sent_bytes_(sent_bytes) {}

Pending Lane::all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes, at::Tensor send,
                         std::vector<int64_t> send_bytes) {
  const at::ThreadLocalStateGuard guard(clean_);
  sent_bytes_.fetch_add(static_cast<uint64_t>(send.numel() - send_bytes[rank_]),
                        std::memory_order_relaxed);
  return backend_->alltoall_base(receive, send, receive_bytes, send_bytes);
}

Pending Lane::all_gather(at::Tensor receive, at::Tensor send) {
  const at::ThreadLocalStateGuard guard(clean_);
  sent_bytes_.fetch_add(static_cast<uint64_t>(send.numel()) * (world_size_ - 1),
                        std::memory_order_relaxed);
  return backend_->_allgather_base(receive, send);
}

void Lane::close_later() {
  constexpr std::chrono::seconds kForSlowerPeers{2};
  // Released to a raw pointer: if no thread can be started, the backend is leaked instead of
  // destroyed here, where its destructor could wait.
  c10d::Backend* backend = backend_.release();
  if (backend == nullptr) return;
  try {
    std::thread([backend, kForSlowerPeers] {
      pthread_setname_np(pthread_self(), "gf-close");
      std::this_thread::sleep_for(kForSlowerPeers);
      if (!process_is_ending) c10::intrusive_ptr<c10d::Backend>::reclaim(backend).reset();
    }).detach();
  } catch (const std::system_error&) {
    return;  // the backend stays open, with what is in flight on it
  }
}

}  // namespace gradferry
