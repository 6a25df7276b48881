#include "tests/faults/sim/network.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "gradferry/wire.h"
#include "hooks/lane.h"

namespace gradferry::sim {
namespace {

// Of a message that comes late: longer than the second after which ranks listen to the store.
constexpr std::chrono::milliseconds kDelay{1700};

// Whether the message has a payload of tiles. All ones are a scale or a value that no lossy codec
// writes.
bool forge(uint32_t lane, std::vector<std::byte>& message) {
  MessageHeader header;
  std::memcpy(&header, message.data(), std::min(sizeof(header), message.size()));
  if ((lane != kScatter && lane != kGather) || header.payload_bytes == 0) return false;
  std::byte* payload = message.data() + kHeaderBytes;
  std::fill_n(payload, header.payload_bytes, std::byte{0xff});
  header.checksum = word_sum(payload, header.payload_bytes);
  std::memcpy(message.data(), &header, sizeof(header));
  return true;
}

}  // namespace

bool Transfer::wait(std::chrono::milliseconds longest) {
  if (!waited_since_) waited_since_ = now();
  const TimePoint last = *waited_since_ + timeout_;
  const TimePoint end = longest == kNoTimeout ? last : std::min(last, now() + longest);
  std::mutex mutex;
  std::unique_lock lock(mutex);
  changed_.wait_until(lock, end, [&] { return isCompleted(); });
  if (now() >= last) fail("timed out");
  if (!isCompleted()) throw std::runtime_error("timed out, and goes on");
  if (exception()) std::rethrow_exception(exception());
  return true;
}

void Transfer::fail(const std::string& why) {
  if (isCompleted()) return;
  finish(std::make_exception_ptr(std::runtime_error(why)));
  changed_.notify_all();
}

void Transfer::part_came() {
  if (--missing != 0 || isCompleted()) return;
  finish();
  changed_.notify_all();
}

class Network::End final : public Lane {
 public:
  End(Network& network, uint32_t index, uint32_t rank, std::vector<uint32_t> ranks)
      : network_(network),
        index_(index),
        ranks_(std::move(ranks)),
        place_(static_cast<uint32_t>(std::ranges::find(ranks_, rank) - ranks_.begin())) {}

  Pending all_to_all(at::Tensor receive, std::vector<int64_t> receive_bytes, at::Tensor send,
                     std::vector<int64_t> send_bytes) override {
    std::vector<Pair> pairs;
    const std::byte* to = bytes(send);
    std::byte* from = bytes(receive);
    for (size_t p = 0; p < ranks_.size(); ++p) {
      pairs.push_back(
          {to, static_cast<size_t>(send_bytes[p]), from, static_cast<size_t>(receive_bytes[p])});
      to += send_bytes[p];
      from += receive_bytes[p];
    }
    return post(pairs, {std::move(receive), std::move(send)});
  }

  Pending all_gather(at::Tensor receive, std::vector<int64_t> receive_bytes,
                     at::Tensor send) override {
    std::vector<Pair> pairs;
    std::byte* from = bytes(receive);
    for (const int64_t size : receive_bytes) {
      pairs.push_back(
          {bytes(send), static_cast<size_t>(send.numel()), from, static_cast<size_t>(size)});
      from += size;
    }
    return post(pairs, {std::move(receive), std::move(send)});
  }

  uint32_t rank() const override { return place_; }
  uint32_t world_size() const override { return static_cast<uint32_t>(ranks_.size()); }

 private:
  struct Pair {
    const std::byte* to;
    size_t to_bytes;
    std::byte* from;
    size_t from_bytes;
  };

  // Like socket lanes, it does not copy this rank's own part.
  Pending post(const std::vector<Pair>& pairs, std::vector<at::Tensor> tensors) {
    const auto transfer = c10::make_intrusive<Transfer>(network_.timeout_, std::move(tensors));
    const uint32_t self = ranks_[place_];
    transfer->missing = 1;  // its own, until all is posted
    for (size_t p = 0; p < ranks_.size(); ++p) {
      if (p == place_ || pairs[p].from_bytes == 0) continue;
      ++transfer->missing;
      Connection& from = network_.connection({index_, ranks_[p], self});
      from.expected.push_back({transfer, pairs[p].from, pairs[p].from_bytes});
      receive(from);
    }
    for (size_t p = 0; p < ranks_.size(); ++p) {
      if (p == place_ || pairs[p].to_bytes == 0) continue;
      network_.send({index_, self, ranks_[p]}, pairs[p].to, pairs[p].to_bytes);
    }
    transfer->part_came();
    return transfer;
  }

  Network& network_;
  const uint32_t index_;
  const std::vector<uint32_t> ranks_;  // in the order of the lane
  const uint32_t place_;               // among them
};

Network::Network(Scheduler& scheduler, std::chrono::milliseconds timeout, Fault fault)
    : scheduler_(scheduler), timeout_(timeout), fault_(fault) {
  scheduler_.set_events(this);
}

Network::~Network() { scheduler_.set_events(nullptr); }

std::shared_ptr<Lane> Network::lane(uint32_t index, uint32_t rank, std::vector<uint32_t> ranks) {
  return std::make_shared<End>(*this, index, rank, std::move(ranks));
}

Network::Connection& Network::connection(const Key& key) {
  return connections_.try_emplace(key, std::get<1>(key), std::get<2>(key)).first->second;
}

uint64_t Network::sent_bytes(uint32_t rank) const {
  const auto found = sent_bytes_.find(rank);
  return found == sent_bytes_.end() ? 0 : found->second;
}

void Network::send(const Key& key, const std::byte* bytes, size_t num_bytes) {
  Connection& on = connection(key);
  sent_bytes_[on.from] += num_bytes;
  Message message{{bytes, bytes + num_bytes}, scheduler_.time()};
  const std::vector<std::byte> sent = message.bytes;
  const uint64_t number = num_messages_++;
  if (fault_.mishap != Mishap::kNone && number == fault_.message) {
    befall(key, on, message);
    if (held_) return;
  } else if (held_ && std::get<1>(held_->first) == on.from && std::get<2>(held_->first) == on.to) {
    std::swap(held_->second.bytes, message.bytes);
    put_on_the_way(connection(held_->first), std::move(held_->second));
    held_.reset();
  }
  on.last = sent;
  put_on_the_way(on, std::move(message));
}

void Network::befall(const Key& key, Connection& on, Message& message) {
  befallen_ = true;
  switch (fault_.mishap) {
    case Mishap::kNone: return;
    case Mishap::kFlip: {
      const bool summed = std::get<0>(key) != kLocalScatter;
      const uint64_t bit = fault_.detail % ((summed ? message.bytes.size() : kHeaderBytes) * 8);
      message.bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      return;
    }
    case Mishap::kTruncate: message.bytes.resize(fault_.detail % message.bytes.size()); return;
    case Mishap::kLose: message.comes = TimePoint::max(); return;
    case Mishap::kReplay:
      befallen_ = !on.last.empty();
      if (befallen_) message.bytes = on.last;
      return;
    case Mishap::kSwap: held_.emplace(key, std::move(message)); return;
    case Mishap::kDelay: message.comes += kDelay; return;
    case Mishap::kStall: on.stalled = true; return;
    case Mishap::kCut: message.closes = true; return;
    case Mishap::kKill: kill(on.from); return scheduler_.stop(on.from);
    case Mishap::kHalt: return scheduler_.stop(on.from);
    case Mishap::kForge: befallen_ = forge(std::get<0>(key), message.bytes); return;
  }
}

void Network::put_on_the_way(Connection& on, Message message) {
  if (on.closed || on.stalled || message.comes == TimePoint::max()) return;
  if (on.on_the_way.empty()) busy_.push_back(&on);
  on.on_the_way.push_back(std::move(message));
}

void Network::kill(uint32_t rank) {
  for (auto& [key, on] : connections_) {
    if (on.from == rank) put_on_the_way(on, {{}, scheduler_.time(), /*closes=*/true});
    if (on.to != rank) continue;
    on.expected.clear();
    on.closed = true;
  }
}

size_t Network::possible() const {
  return static_cast<size_t>(std::ranges::count_if(busy_, [&](const Connection* on) {
    return on->on_the_way.front().comes <= scheduler_.time();
  }));
}

void Network::happen(size_t which) {
  const auto found = std::ranges::find_if(busy_, [&](const Connection* on) {
    return on->on_the_way.front().comes <= scheduler_.time() && which-- == 0;
  });
  Connection& on = **found;
  Message message = std::move(on.on_the_way.front());
  on.on_the_way.pop_front();
  if (on.on_the_way.empty()) busy_.erase(found);
  if (on.closed || scheduler_.has_stopped(on.to)) return;
  if (message.closes) {
    on.closed = true;
  } else {
    on.here.push_back(std::move(message));
  }
  receive(on);
}

TimePoint Network::next() const {
  TimePoint next = TimePoint::max();
  for (const Connection* on : busy_) next = std::min(next, on->on_the_way.front().comes);
  return next;
}

// Gives to collectives what has come for them.
void Network::receive(Connection& on) {
  const std::string sender = "rank " + std::to_string(on.from);
  while (!on.here.empty() && !on.expected.empty()) {
    const Message message = std::move(on.here.front());
    const Expected expected = std::move(on.expected.front());
    on.here.pop_front();
    on.expected.pop_front();
    if (message.bytes.size() != expected.num_bytes) {
      expected.transfer->fail(sender + " sends a message of " +
                              std::to_string(message.bytes.size()) + " bytes where " +
                              std::to_string(expected.num_bytes) + " were expected");
      continue;
    }
    std::ranges::copy(message.bytes, expected.place);
    expected.transfer->part_came();
  }
  if (!on.closed) return;
  for (const Expected& expected : std::exchange(on.expected, {})) {
    expected.transfer->fail(sender + ": connection closed by peer");
  }
}

}  // namespace gradferry::sim
