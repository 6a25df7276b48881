#include "lane.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "background_thread.h"
#include "threads.h"

namespace gradferry {

at::ThreadLocalState thread_state_without_python() {
  std::optional<at::ThreadLocalState> state;
  std::thread([&] { state.emplace(); }).join();
  return *state;
}

CarrierLane::CarrierLane(Carrier carrier, std::shared_ptr<const at::ThreadLocalState> clean)
    : carrier_(std::move(carrier)),
      rank_(std::visit([](auto& on) { return static_cast<uint32_t>(on->getRank()); }, carrier_)),
      world_size_(
          std::visit([](auto& on) { return static_cast<uint32_t>(on->getSize()); }, carrier_)),
      clean_(std::move(clean)) {}

Pending CarrierLane::all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes,
                                at::Tensor send, std::vector<int64_t> send_bytes) {
  const at::ThreadLocalStateGuard guard(*clean_);
  // Every rank sends the same sizes, so all of them leave the sizes out, or none does.
  const auto other = [&](int64_t num_bytes) { return num_bytes != send_bytes.front(); };
  if (std::ranges::none_of(send_bytes, other)) {
    send_bytes.clear();
    receive_bytes.clear();
  }
  return std::visit(
      [&](auto& on) { return post_all_to_all(*on, receive, send, receive_bytes, send_bytes); },
      carrier_);
}

Pending CarrierLane::all_gather(at::Tensor receive, at::Tensor send) {
  const at::ThreadLocalStateGuard guard(*clean_);
  return std::visit([&](auto& on) { return post_all_gather(*on, receive, send); }, carrier_);
}

void close_later(OpenLanes lanes) noexcept {
  constexpr std::chrono::seconds kForSlowerPeers{2};
  if (std::ranges::none_of(lanes, [](const auto& lane) { return lane != nullptr; })) return;
  // A raw pointer: if no thread can be started, the lanes are leaked instead of destroyed here,
  // where their destructors could wait.
  auto* open = new (std::nothrow) OpenLanes(std::move(lanes));
  if (open == nullptr) return;
  try {
    start_thread("gf-close", [open, kForSlowerPeers] {
      sleep_for(kForSlowerPeers);
      if (!process_is_ending) delete open;
    });
  } catch (const std::exception&) {
    return;  // the lanes stay open, with what is in flight on them
  }
}

}  // namespace gradferry
