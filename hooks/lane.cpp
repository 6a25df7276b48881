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
namespace {

bool are_equal(const std::vector<int64_t>& sizes) {
  return std::ranges::all_of(sizes, [&](int64_t size) { return size == sizes.front(); });
}

// Of a collective in which nobody sends anything.
class NothingToSend final : public c10d::Work {
 public:
  NothingToSend() { finish(); }
};

}  // namespace

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
  if (receive.numel() == 0 && send.numel() == 0) return c10::make_intrusive<NothingToSend>();
  const at::ThreadLocalStateGuard guard(*clean_);
  // All ranks send or receive the same sizes, so all of them leave the sizes out, or none does.
  if (are_equal(send_bytes) && are_equal(receive_bytes)) {
    send_bytes.clear();
    receive_bytes.clear();
  }
  return std::visit(
      [&](auto& on) { return post_all_to_all(*on, receive, send, receive_bytes, send_bytes); },
      carrier_);
}

// Messages of different sizes as an all-to-all with the same for everybody. NCCL takes lists of
// tensors, which may all be one; gloo takes one tensor, and memory on hosts is cheap.
Pending CarrierLane::all_gather(at::Tensor receive, std::vector<int64_t> receive_bytes,
                                at::Tensor send) {
  if (receive.numel() == 0) return c10::make_intrusive<NothingToSend>();
  const at::ThreadLocalStateGuard guard(*clean_);
  if (are_equal(receive_bytes)) {
    return std::visit([&](auto& on) { return post_all_gather(*on, receive, send); }, carrier_);
  }
  if (receive.is_cpu()) {
    return all_to_all(receive, receive_bytes, send.repeat({world_size_}),
                      std::vector<int64_t>(world_size_, send.numel()));
  }
  std::vector<at::Tensor> parts = receive.split_with_sizes(receive_bytes);
  std::vector<at::Tensor> sent(world_size_, send);
  // In its place already.
  if (parts[rank_].is_alias_of(send)) parts[rank_] = sent[rank_] = send.narrow(0, 0, 0);
  return std::visit([&](auto& on) { return on->alltoall(parts, sent); }, carrier_);
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
