#include "host/connect_ranks.h"

#include <c10/util/Exception.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "host/listen.h"
#include "store_text.h"

namespace gradferry {
namespace {

using std::chrono::milliseconds;

using Secret = std::array<unsigned char, 16>;

// What a rank sends that connects.
struct Hello {
  Secret question;
  uint32_t rank;
  uint32_t lane;
};
static_assert(sizeof(Hello) == 24);

// Maximum number of connections that have not sent a hello, or twice the expected ones if that is
// more. Beyond it the oldest is closed.
constexpr size_t kMostStrangers = 64;
constexpr milliseconds kBetweenCalls{100};  // of `between_polls`
// Between two reads of the store.
constexpr milliseconds kLeastBetweenReads{1}, kMostBetweenReads{100};

// Probes keep routers from forgetting idle connections. An idle one is broken only after two hours
// without an answer; what is in flight has a timeout of its own.
struct SocketOption {
  int level, name, value;
};
constexpr std::array kSocketOptions{
    SocketOption{IPPROTO_TCP, TCP_NODELAY, 1},   SocketOption{SOL_SOCKET, SO_KEEPALIVE, 1},
    SocketOption{IPPROTO_TCP, TCP_KEEPIDLE, 60}, SocketOption{IPPROTO_TCP, TCP_KEEPINTVL, 60},
    SocketOption{IPPROTO_TCP, TCP_KEEPCNT, 120},
};

// accept() fails with these when a connection is gone before it was accepted, or its network is.
constexpr std::array kGone{EAGAIN, ECONNABORTED, ENETDOWN,   EPROTO,      ENOPROTOOPT, EHOSTDOWN,
                           ENONET, EHOSTUNREACH, EOPNOTSUPP, ENETUNREACH, EPERM,       EINTR};
// A connection fails with these when the other rank is gone, or its machine is.
constexpr std::array kOtherIsGone{ECONNREFUSED, ECONNRESET, EPIPE, ETIMEDOUT};

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

EchoError other_failed(const std::string& reason) {
  return EchoError("the other ranks did not connect: " + reason +
                   "; look at their errors first, then name a network interface that all can reach "
                   "in GLOO_SOCKET_IFNAME");
}

Error this_failed(const std::string& reason, bool is_out_of_files = false) {
  return {ErrorKind::kPeer,
          "cannot connect to the other ranks: " + reason +
              (is_out_of_files ? "; raise the process's limit of open files (ulimit -n)"
                               : "; look at the network of this rank's host")};
}

// Where a rank listens: one address or more, for lanes in turn.
struct ListeningPlace {
  Secret question, answer;
  std::vector<Address> addresses;

  const Address& address_of(uint32_t lane) const { return addresses[lane % addresses.size()]; }
};

std::string hexadecimal(const Secret& secret) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : secret) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

Secret secret_from(std::istream& words) {
  Secret secret{};
  std::string text;
  words >> text;
  if (text.size() != 2 * secret.size() ||
      text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw std::invalid_argument("no secret");
  }
  for (size_t i = 0; i < secret.size(); ++i) {
    secret[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return secret;
}

Secret random_secret() {
  Secret secret{};
  if (getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size())) {
    throw system_error("getrandom");
  }
  return secret;
}

// Takes the same time for all secrets.
bool equal(const Secret& one, const Secret& other) {
  unsigned different = 0;
  for (size_t i = 0; i < one.size(); ++i) {
    different |= static_cast<unsigned>(one[i]) ^ static_cast<unsigned>(other[i]);
  }
  return different == 0;
}

// "<question> <answer> 4 127.0.0.1 41234"
std::string text_of(const ListeningPlace& place) {
  std::ostringstream text;
  text << hexadecimal(place.question) << ' ' << hexadecimal(place.answer);
  for (const Address& address : place.addresses) text << ' ' << text_of(address);
  return text.str();
}

// `own`: where this rank listens.
ListeningPlace place_from(const std::vector<uint8_t>& value, const ListeningPlace& own) {
  try {
    std::istringstream words(std::string(value.begin(), value.end()));
    ListeningPlace place{
        .question = secret_from(words), .answer = secret_from(words), .addresses = {}};
    do {
      const auto lane = static_cast<uint32_t>(place.addresses.size());
      place.addresses.push_back(address_from(words, own.address_of(lane)));
    } while (!(words >> std::ws).eof());
    return place;
  } catch (const std::invalid_argument&) {
    throw Error(ErrorKind::kPeer,
                "another rank runs another version of gradferry; install the same on all ranks");
  }
}

// A connection that is not a lane's yet.
struct Handshake {
  Descriptor connection;
  uint32_t rank = 0, lane = 0;  // of whom it is connected to; unknown before it has said hello
  std::array<unsigned char, sizeof(Hello)> came{};
  size_t num_bytes = 0;
  bool is_connecting = false;
};

// Whether all of it has come. Throws std::system_error; ECONNRESET also where it was closed.
bool has_come(Handshake& handshake, size_t size) {
  const ssize_t more =
      recv(handshake.connection.number(), handshake.came.data() + handshake.num_bytes,
           size - handshake.num_bytes, 0);
  if (more < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (more < 0) throw system_error("recv");
  if (more == 0) throw std::system_error(ECONNRESET, std::generic_category());
  handshake.num_bytes += static_cast<size_t>(more);
  return handshake.num_bytes == size;
}

// These are the first bytes on a connection: they fit.
void send_all(const Handshake& handshake, const void* bytes, size_t size) {
  const ssize_t sent = send(handshake.connection.number(), bytes, size, MSG_NOSIGNAL);
  if (sent != static_cast<ssize_t>(size)) throw system_error("send");
}

class Connector {
 public:
  Connector(c10d::Store& store, const Connecting& how);

  std::vector<LaneSockets> connect();

 private:
  using Ticket = uint64_t;  // rises

  std::map<uint32_t, ListeningPlace> places_below();
  void begin(uint32_t rank, uint32_t lane);
  void serve(Ticket ticket);
  bool is_answered(Handshake& greeted, Ticket ticket);
  bool is_done(Handshake& stranger);
  void accept_from(const Listener& listener);
  void keep(Handshake& handshake);
  void watch(int operation, int descriptor, Ticket ticket, uint32_t events) const;

  [[noreturn]] void fail(uint32_t rank, const std::system_error& error) const;
  uint32_t lowest_missing() const;
  // Throws after the deadline, because `rank` did not come.
  milliseconds left(uint32_t rank) const;
  void call_between_polls();
  std::string name_of(uint32_t rank) const {
    return name_ranks({in_world(how_.world_ranks, rank)});
  }

  c10d::Store& store_;
  const Connecting& how_;
  const Descriptor poller_;
  const std::vector<Listener> listeners_;  // whose tickets are their indices
  Ticket next_ticket_;
  ListeningPlace own_;
  std::map<uint32_t, std::vector<uint32_t>> lanes_to_;  // by other rank
  std::map<uint32_t, ListeningPlace> places_;           // of ranks below
  std::map<Ticket, Handshake> greeted_;                 // connections to them without an answer
  std::set<std::pair<uint32_t, uint32_t>> expected_;    // ranks above that did not come, and lanes
  std::map<Ticket, Handshake> strangers_;               // connections that have not said a hello
  size_t most_strangers_ = kMostStrangers;
  TimePoint called_ = now();
  std::vector<LaneSockets> made_;
};

Connector::Connector(c10d::Store& store, const Connecting& how)
    : store_(store),
      how_(how),
      poller_(epoll_create1(EPOLL_CLOEXEC)),
      listeners_(listen_where_gloo_would(how.lanes.size())),
      next_ticket_(listeners_.size()),
      own_{.question = random_secret(), .answer = random_secret(), .addresses = {}} {
  if (poller_.number() < 0) throw system_error("epoll_create1");
  for (Ticket ticket = 0; ticket < listeners_.size(); ++ticket) {
    own_.addresses.push_back(listeners_[ticket].address);
    watch(EPOLL_CTL_ADD, listeners_[ticket].socket.number(), ticket, EPOLLIN);
  }
  for (uint32_t lane = 0; lane < how.lanes.size(); ++lane) {
    LaneSockets& made = made_.emplace_back(LaneSockets{how.lanes[lane], {}});
    made.connections.resize(how.world_size);
    for (const uint32_t other : made.ranks) {
      if (other != how.rank) lanes_to_[other].push_back(lane);
      if (other > how.rank) expected_.emplace(other, lane);
    }
  }
  most_strangers_ = std::max(kMostStrangers, 2 * expected_.size());
}

std::vector<LaneSockets> Connector::connect() {
  const std::string key = std::to_string(how_.rank);
  write_text(store_, key, text_of(own_));
  places_ = places_below();
  for (const auto& [rank, place] : places_) {
    for (const uint32_t lane : lanes_to_[rank]) begin(rank, lane);
  }
  std::array<epoll_event, 64> events{};
  while (!greeted_.empty() || !expected_.empty()) {
    const milliseconds longest = std::min(left(lowest_missing()), kBetweenCalls);
    const int ready = epoll_wait(poller_.number(), events.data(), static_cast<int>(events.size()),
                                 static_cast<int>(longest.count()));
    if (ready < 0 && errno != EINTR) throw system_error("epoll_wait");
    for (int i = 0; i < ready; ++i) serve(events[i].data.u64);
    call_between_polls();
  }
  forget_keys(store_, {key});  // all that read it are connected
  return std::move(made_);
}

// Waits until all ranks below have written where they listen.
std::map<uint32_t, ListeningPlace> Connector::places_below() {
  std::vector<uint32_t> ranks;
  std::vector<std::string> keys;
  for (const auto& [rank, lanes] : lanes_to_) {
    if (rank > how_.rank) continue;
    ranks.push_back(rank);
    keys.push_back(std::to_string(rank));
  }
  if (keys.empty()) return {};
  for (milliseconds pause = kLeastBetweenReads; !store_.check(keys);
       pause = std::min(2 * pause, kMostBetweenReads)) {
    const bool is_late = now() >= how_.deadline;
    for (size_t i = 0; is_late && i < keys.size(); ++i) {
      if (!store_.check({keys[i]})) left(ranks[i]);
    }
    sleep_for(pause);
    call_between_polls();
  }
  std::vector<std::vector<uint8_t>> values;
  if (store_.hasExtendedApi()) {
    values = store_.multiGet(keys);
  } else {
    for (const std::string& key : keys) values.push_back(store_.get(key));
  }
  std::map<uint32_t, ListeningPlace> places;
  for (size_t i = 0; i < ranks.size(); ++i) places.emplace(ranks[i], place_from(values[i], own_));
  return places;
}

void Connector::begin(uint32_t rank, uint32_t lane) {
  const Address& address = places_.at(rank).address_of(lane);
  Handshake handshake{.connection = new_socket(address.family()), .rank = rank, .lane = lane};
  const int socket = handshake.connection.number();
  handshake.is_connecting = true;
  if (::connect(socket, address.get(), address.size) != 0 && errno != EINPROGRESS) {
    fail(rank, system_error("connect"));
  }
  watch(EPOLL_CTL_ADD, socket, next_ticket_, EPOLLOUT);
  greeted_.emplace(next_ticket_++, std::move(handshake));
}

// Something has come, or can be sent.
void Connector::serve(Ticket ticket) {
  if (ticket < listeners_.size()) {
    accept_from(listeners_[ticket]);
  } else if (const auto greeted = greeted_.find(ticket); greeted != greeted_.end()) {
    Handshake& handshake = greeted->second;
    try {
      if (!is_answered(handshake, ticket)) return;
    } catch (const std::system_error& error) {
      fail(handshake.rank, error);
    }
    keep(handshake);
    greeted_.erase(greeted);
  } else if (const auto stranger = strangers_.find(ticket); stranger != strangers_.end()) {
    if (is_done(stranger->second)) strangers_.erase(stranger);
  }
}

// Sends a hello when there is a connection, then reads the answer.
bool Connector::is_answered(Handshake& greeted, Ticket ticket) {
  const ListeningPlace& place = places_.at(greeted.rank);
  if (greeted.is_connecting) {
    const int socket = greeted.connection.number();
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) throw std::system_error(error, std::generic_category());
    const Hello hello{place.question, how_.rank, greeted.lane};
    send_all(greeted, &hello, sizeof(hello));
    greeted.is_connecting = false;
    watch(EPOLL_CTL_MOD, socket, ticket, EPOLLIN);
    return false;
  }
  Secret answer;
  if (!has_come(greeted, sizeof(answer))) return false;
  std::memcpy(answer.data(), greeted.came.data(), sizeof(answer));
  if (!equal(answer, place.answer)) {
    throw this_failed(name_of(greeted.rank) + ": another program listens at its address now");
  }
  return true;
}

// Whether nothing more is to come from a stranger: it is who is expected, or is sent away.
bool Connector::is_done(Handshake& stranger) {
  Hello hello;
  try {
    if (!has_come(stranger, sizeof(hello))) return false;
  } catch (const std::system_error&) {
    return true;
  }
  std::memcpy(&hello, stranger.came.data(), sizeof(hello));
  if (!equal(hello.question, own_.question) || expected_.erase({hello.rank, hello.lane}) == 0) {
    return true;
  }
  stranger.rank = hello.rank;
  stranger.lane = hello.lane;
  try {
    send_all(stranger, own_.answer.data(), own_.answer.size());
  } catch (const std::system_error& error) {
    fail(stranger.rank, error);
  }
  keep(stranger);
  return true;
}

void Connector::accept_from(const Listener& listener) {
  if (strangers_.size() == most_strangers_) strangers_.erase(strangers_.begin());
  Descriptor accepted(
      accept4(listener.socket.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (accepted.number() >= 0) {
    watch(EPOLL_CTL_ADD, accepted.number(), next_ticket_, EPOLLIN);
    strangers_[next_ticket_++].connection = std::move(accepted);
  } else if (std::ranges::find(kGone, errno) == kGone.end()) {
    throw system_error("accept");
  }
}

void Connector::keep(Handshake& handshake) {
  const int socket = handshake.connection.number();
  watch(EPOLL_CTL_DEL, socket, 0, 0);
  for (const auto& [level, name, value] : kSocketOptions) {
    if (setsockopt(socket, level, name, &value, sizeof(value)) != 0) {
      throw system_error("setsockopt");
    }
  }
  made_[handshake.lane].connections[handshake.rank] = std::move(handshake.connection);
}

void Connector::watch(int operation, int descriptor, Ticket ticket, uint32_t events) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = ticket;
  if (epoll_ctl(poller_.number(), operation, descriptor, &event) != 0) {
    throw system_error("epoll_ctl");
  }
}

// A connection to that rank failed.
void Connector::fail(uint32_t rank, const std::system_error& error) const {
  const std::string reason = name_of(rank) + ": " + error.code().message();
  const bool is_gone = std::ranges::find(kOtherIsGone, error.code().value()) != kOtherIsGone.end();
  if (is_gone) throw other_failed(reason);
  throw this_failed(reason);
}

uint32_t Connector::lowest_missing() const {
  uint32_t lowest = expected_.empty() ? how_.world_size : expected_.begin()->first;
  for (const auto& [ticket, handshake] : greeted_) lowest = std::min(lowest, handshake.rank);
  return lowest;
}

milliseconds Connector::left(uint32_t rank) const {
  const auto rest = std::chrono::duration_cast<milliseconds>(how_.deadline - now());
  if (rest.count() <= 0) throw other_failed(name_of(rank) + " timed out");
  return rest;
}

void Connector::call_between_polls() {
  if (!how_.between_polls || now() < called_ + kBetweenCalls) return;
  how_.between_polls();
  called_ = now();
}

}  // namespace

std::vector<LaneSockets> connect_ranks(c10d::Store& store, const Connecting& how) {
  try {
    return Connector(store, how).connect();
  } catch (const std::system_error& error) {
    throw this_failed(first_line(error.what()), is_out_of_files(error));
  } catch (const c10::Error& error) {  // the store's server is gone, or too slow
    throw other_failed(first_line(error.what()));
  }
}

}  // namespace gradferry
