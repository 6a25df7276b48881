// Connections between ranks, in memory: what socket lanes are between processes. Every message is
// preceded by its size, and messages of a connection come in order.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hooks/lane.h"
#include "tests/faults/sim/scheduler.h"

namespace gradferry::sim {

// Lanes, by purpose.
enum LaneIndex : uint32_t {
  kScatter,
  kGather,
  kCommit,
  kLocalScatter,
  kForward,
  kHashes,
  kNumLanes
};

// What befalls one message, or the rank that sends it.
enum class Mishap : uint8_t {
  kNone,
  kFlip,      // of one bit; only of the header where the rest has no checksum, between siblings
  kTruncate,  // it ends early
  kLose,      // it never comes, what follows does
  kReplay,    // the message before it on this connection comes again in its place
  kSwap,      // it changes places with the next one between these ranks, on any lane
  kDelay,     // it comes late, but within the timeout
  kStall,     // neither it nor what follows on its connection comes
  kCut,       // its connection is closed
  kKill,      // the rank ends before it sends it
  kHalt,      // the rank stops, and its connections stay open
  kForge,     // its payload is one that no encoder writes, under a right checksum
};

struct Fault {
  Mishap mishap = Mishap::kNone;
  uint64_t message = 0;  // its number, in the order of sending
  uint64_t detail = 0;   // which bit or byte
};

// A collective of one rank, under way.
class Transfer final : public c10d::Work {
 public:
  Transfer(std::chrono::milliseconds timeout, std::vector<at::Tensor> tensors)
      : timeout_(timeout), tensors_(std::move(tensors)) {}

  bool wait(std::chrono::milliseconds longest) override;
  void fail(const std::string& why);
  void part_came();

  size_t missing = 0;  // messages that have not come

 private:
  const std::chrono::milliseconds timeout_;
  const std::vector<at::Tensor> tensors_;
  std::optional<TimePoint> waited_since_;
  Signal changed_;
};

class Network final : public Events {
 public:
  Network(Scheduler& scheduler, std::chrono::milliseconds timeout, Fault fault);
  ~Network() override;

  // `rank`'s end of lane number `index`, which connects `ranks`.
  std::shared_ptr<Lane> lane(uint32_t index, uint32_t rank, std::vector<uint32_t> ranks);
  // As if the process of the rank ended: its connections are closed after what it has sent.
  void kill(uint32_t rank);

  uint64_t num_messages() const { return num_messages_; }
  // What a rank sent, without the sizes.
  uint64_t sent_bytes(uint32_t rank) const;
  // Whether the fault has come about.
  bool has_befallen() const { return befallen_; }

  // A connection's next message comes, or its end.
  size_t possible() const override;
  void happen(size_t which) override;
  TimePoint next() const override;

 private:
  class End;  // a rank's end of a lane
  using TransferPtr = c10::intrusive_ptr<Transfer>;
  using Key = std::tuple<uint32_t, uint32_t, uint32_t>;  // lane, from, to

  struct Message {
    std::vector<std::byte> bytes;
    TimePoint comes;      // at the earliest
    bool closes = false;  // no message: the connection ends here
  };
  // What a collective still expects of a connection.
  struct Expected {
    TransferPtr transfer;
    std::byte* place;
    size_t num_bytes;
  };
  struct Connection {
    Connection(uint32_t from_rank, uint32_t to_rank) : from(from_rank), to(to_rank) {}

    const uint32_t from, to;
    std::deque<Message> on_the_way, here;
    std::deque<Expected> expected;
    std::vector<std::byte> last;  // message sent
    bool stalled = false;         // nothing comes any more
    bool closed = false;
  };

  Connection& connection(const Key& key);
  void send(const Key& key, const std::byte* bytes, size_t num_bytes);
  void befall(const Key& key, Connection& on, Message& message);
  void put_on_the_way(Connection& on, Message message);
  static void receive(Connection& on);

  Scheduler& scheduler_;
  const std::chrono::milliseconds timeout_;
  const Fault fault_;
  std::map<Key, Connection> connections_;
  std::vector<Connection*> busy_;  // those with something on the way
  std::map<uint32_t, uint64_t> sent_bytes_;
  uint64_t num_messages_ = 0;
  bool befallen_ = false;
  std::optional<std::pair<Key, Message>> held_;  // until the one to swap it with is sent
};

}  // namespace gradferry::sim
