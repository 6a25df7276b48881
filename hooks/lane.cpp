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

Lane::Lane(Carrier carrier, const at::ThreadLocalState& clean, std::atomic<uint64_t>& sent_bytes)
    : carrier_(std::move(carrier)),
      rank_(std::visit([](auto& on) { return static_cast<size_t>(on->getRank()); }, carrier_)),
      world_size_(
          std::visit([](auto& on) { return static_cast<uint64_t>(on->getSize()); }, carrier_)),
      clean_(clean),
      sent_bytes_(sent_bytes) {}

Pending Lane::all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes, at::Tensor send,
                         std::vector<int64_t> send_bytes) {
  const at::ThreadLocalStateGuard guard(clean_);
  sent_bytes_.fetch_add(static_cast<uint64_t>(send.numel() - send_bytes[rank_]),
                        std::memory_order_relaxed);
  return std::visit(
      [&](auto& on) { return post_all_to_all(*on, receive, send, receive_bytes, send_bytes); },
      carrier_);
}

Pending Lane::all_gather(at::Tensor receive, at::Tensor send) {
  const at::ThreadLocalStateGuard guard(clean_);
  sent_bytes_.fetch_add(static_cast<uint64_t>(send.numel()) * (world_size_ - 1),
                        std::memory_order_relaxed);
  return std::visit([&](auto& on) { return post_all_gather(*on, receive, send); }, carrier_);
}

void Lane::close_later() {
  constexpr std::chrono::seconds kForSlowerPeers{2};
  // Released to a raw pointer: if no thread can be started, the backend is leaked instead of
  // destroyed here, where its destructor could wait.
  c10d::Backend* backend = own_backend().release();
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
