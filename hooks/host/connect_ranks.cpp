#include "host/connect_ranks.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <list>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "store_text.h"

namespace gradferry {
namespace {

using std::chrono::milliseconds;

using Secret = std::array<unsigned char, 16>;

// What a rank sends that connects: the question and its number.
struct Hello {
  Secret question;
  uint32_t rank;
};
static_assert(sizeof(Hello) == 20);

// That have not said yet who they are, or twice the ranks; with one more the oldest is closed.
constexpr size_t kMostStrangers = 64;
constexpr milliseconds kLongestPoll{100};
// Between two reads of the store.
constexpr milliseconds kLeastPause{1}, kMostPause{100};

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

// Of accept(2): a connection is gone again before it was accepted, or its network is.
constexpr std::array kGone{EAGAIN, ECONNABORTED, ENETDOWN,   EPROTO,      ENOPROTOOPT, EHOSTDOWN,
                           ENONET, EHOSTUNREACH, EOPNOTSUPP, ENETUNREACH, EPERM,       EINTR};

std::string text_of(int error) { return std::generic_category().message(error); }

std::system_error system_error(const std::string& what) {
  return {errno, std::generic_category(), what};
}

// That this rank wrote into the store, removed when it has connected, or failed.
struct Written {
  c10d::Store& store;
  const std::string key;

  Written(c10d::Store& written_to, const std::string& name, const std::string& text)
      : store(written_to), key(name) {
    write_text(store, key, text);
  }
  ~Written() { forget_keys(store, {key}); }
  Written(const Written&) = delete;
  Written& operator=(const Written&) = delete;
};

// An address of a socket.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  sockaddr_in& v4() { return reinterpret_cast<sockaddr_in&>(storage); }
  sockaddr_in6& v6() { return reinterpret_cast<sockaddr_in6&>(storage); }
  bool is_link_local() {
    return family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6().sin6_addr) != 0;
  }
};

// Where a rank listens, as it stands in the store.
struct Place {
  Address address;
  Secret question, answer;
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

Secret secret_from(const std::string& text) {
  Secret secret{};
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

// "4 127.0.0.1 41234 <question> <answer>"
std::string text_of(Place place) {
  std::array<char, INET6_ADDRSTRLEN> host{};
  const bool is_v4 = place.address.family() == AF_INET;
  const void* bytes = is_v4 ? static_cast<const void*>(&place.address.v4().sin_addr)
                            : static_cast<const void*>(&place.address.v6().sin6_addr);
  inet_ntop(place.address.family(), bytes, host.data(), host.size());
  const uint16_t port = is_v4 ? place.address.v4().sin_port : place.address.v6().sin6_port;
  return std::string(is_v4 ? "4 " : "6 ") + host.data() + " " + std::to_string(ntohs(port)) + " " +
         hexadecimal(place.question) + " " + hexadecimal(place.answer);
}

// `own`: where this rank listens. A link-local address of another is on the same interface.
Place place_from(const std::vector<uint8_t>& value, Address& own) {
  Place place{};
  try {
    std::istringstream words(std::string(value.begin(), value.end()));
    int family = 0;
    uint16_t port = 0;
    std::string host, question, answer;
    words >> family >> host >> port >> question >> answer;
    if (!words || (family != 4 && family != 6)) throw std::invalid_argument("no place");
    place.question = secret_from(question);
    place.answer = secret_from(answer);
    void* bytes = nullptr;
    if (family == 4) {
      sockaddr_in& address = place.address.v4();
      address.sin_family = AF_INET;
      address.sin_port = htons(port);
      place.address.size = sizeof(address);
      bytes = &address.sin_addr;
    } else {
      sockaddr_in6& address = place.address.v6();
      address.sin6_family = AF_INET6;
      address.sin6_port = htons(port);
      if (own.family() == AF_INET6) address.sin6_scope_id = own.v6().sin6_scope_id;
      place.address.size = sizeof(address);
      bytes = &address.sin6_addr;
    }
    if (inet_pton(place.address.family(), host.c_str(), bytes) != 1) {
      throw std::invalid_argument("no address");
    }
  } catch (const std::invalid_argument&) {
    throw std::runtime_error(
        "another rank runs another version of gradferry; install one on all ranks");
  }
  return place;
}

// --- where to listen ---

// IPv4 first, then IPv6, link-local ones last.
std::vector<Address> addresses_of_interface(const std::string& name) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw system_error("the network interfaces");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(first, &freeifaddrs);
  std::vector<Address> found;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || name != each->ifa_name) continue;
    const int family = each->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Address address;
    address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.storage, each->ifa_addr, address.size);
    found.push_back(address);
  }
  const auto place = [](Address one) {
    return one.family() == AF_INET ? 0 : one.is_link_local() ? 2 : 1;
  };
  std::vector<Address> ordered;
  for (const int wanted : {0, 1, 2}) {
    std::ranges::copy_if(found, std::back_inserter(ordered),
                         [&](const Address& one) { return place(one) == wanted; });
  }
  return ordered;
}

// Of what a name leads to. `reason`: why it leads nowhere.
std::vector<Address> addresses_of_host(const std::string& host, std::string& reason) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  const int failure = getaddrinfo(host.c_str(), nullptr, &hints, &first);
  if (failure == EAI_SYSTEM) {
    const std::system_error error = system_error(host);
    if (is_out_of_files(error)) throw error;
    reason = error.code().message();
    return {};
  }
  if (failure != 0) {
    reason = gai_strerror(failure);
    return {};
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owned(first, &freeaddrinfo);
  std::vector<Address> found;
  for (const addrinfo* each = first; each != nullptr; each = each->ai_next) {
    if (each->ai_addrlen > sizeof(sockaddr_storage)) continue;
    Address address;
    address.size = each->ai_addrlen;
    std::memcpy(&address.storage, each->ai_addr, address.size);
    found.push_back(address);
  }
  return found;
}

Descriptor new_socket(int family) {
  Descriptor made(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (made.number() < 0) throw system_error("socket");
  return made;
}

std::vector<std::string> interfaces_wanted() {
  const char* names = std::getenv("GLOO_SOCKET_IFNAME");
  std::istringstream list(names == nullptr ? "" : names);
  std::vector<std::string> wanted;
  for (std::string name; std::getline(list, name, ',');) {
    if (!name.empty()) wanted.push_back(name);
  }
  return wanted;
}

// A socket that listens. Writes where to `address`.
Descriptor listen_on(uint64_t number, Address& address) {
  const std::vector<std::string> names = interfaces_wanted();
  std::string reason, what = "the name of this host";
  std::vector<Address> candidates;
  if (names.empty()) {
    // Where the host's name leads to, as for gloo, and loopback where that is not this machine.
    std::array<char, HOST_NAME_MAX + 1> host{};
    gethostname(host.data(), host.size() - 1);
    for (const std::string& each : {std::string(host.data()), std::string("127.0.0.1")}) {
      for (const Address& found : addresses_of_host(each, reason)) candidates.push_back(found);
    }
  } else {
    const std::string& name = names[number % names.size()];
    what = "GLOO_SOCKET_IFNAME: the network interface '" + name + "'";
    candidates = addresses_of_interface(name);
  }
  for (Address& candidate : candidates) {
    if (candidate.family() == AF_INET) candidate.v4().sin_port = 0;
    if (candidate.family() == AF_INET6) candidate.v6().sin6_port = 0;
    Descriptor listener;
    try {
      listener = new_socket(candidate.family());
    } catch (const std::system_error& error) {
      if (is_out_of_files(error)) throw;
      reason = error.code().message();  // a host without that family
      continue;
    }
    address = {};
    address.size = sizeof(address.storage);
    if (bind(listener.number(), candidate.get(), candidate.size) == 0 &&
        listen(listener.number(), SOMAXCONN) == 0 &&
        getsockname(listener.number(), address.get(), &address.size) == 0) {
      return listener;
    }
    reason = text_of(errno);
  }
  throw std::runtime_error(what + " has no address to listen on" +
                           (reason.empty() ? "" : ": " + reason) + "; set GLOO_SOCKET_IFNAME");
}

// --- meeting ---

// Until the deadline; throws then, because `rank` did not come.
milliseconds left(const Connecting& how, uint32_t rank) {
  const auto rest = std::chrono::duration_cast<milliseconds>(how.deadline - now());
  if (rest.count() <= 0) throw std::runtime_error("rank " + std::to_string(rank) + " timed out");
  return rest;
}

// Returns when one of `polled` is ready. `rank`: for which it waits.
void wait_for_any(std::vector<pollfd>& polled, const Connecting& how, uint32_t rank) {
  for (;;) {
    const milliseconds longest = std::min(left(how, rank), kLongestPoll);
    const int ready = poll(polled.data(), polled.size(), static_cast<int>(longest.count()));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw system_error("poll");
    if (how.between_polls) how.between_polls();
  }
}

void wait_until(int socket, short events, const Connecting& how, uint32_t rank) {
  std::vector<pollfd> polled{{socket, events, 0}};
  wait_for_any(polled, how, rank);
}

// What a rank has written, or will, under a key.
std::vector<uint8_t> value_from(c10d::Store& store, const std::string& key, const Connecting& how,
                                uint32_t rank) {
  milliseconds pause = kLeastPause;
  while (!store.check({key})) {
    sleep_for(std::min(pause, left(how, rank)));
    pause = std::min(2 * pause, kMostPause);
    if (how.between_polls) how.between_polls();
  }
  return store.get(key);
}

std::string key_of(const Connecting& how, uint32_t rank) {
  return std::to_string(how.number) + "/" + std::to_string(rank);
}

// These are the first bytes on a connection: they fit.
void send_all(int socket, const void* bytes, size_t size) {
  if (send(socket, bytes, size, MSG_NOSIGNAL) != static_cast<ssize_t>(size)) {
    throw std::runtime_error(text_of(errno));
  }
}

Descriptor connect_to(const Place& place, uint32_t rank, const Connecting& how) {
  Descriptor connection = new_socket(place.address.family());
  const int socket = connection.number();
  if (connect(socket, place.address.get(), place.address.size) != 0) {
    if (errno != EINPROGRESS) throw std::runtime_error(text_of(errno));
    wait_until(socket, POLLOUT, how, rank);
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) throw std::runtime_error(text_of(error));
  }
  const Hello hello{place.question, how.rank};
  send_all(socket, &hello, sizeof(hello));
  Secret answer{};
  for (size_t came = 0; came < answer.size();) {
    wait_until(socket, POLLIN, how, rank);
    const ssize_t more = recv(socket, answer.data() + came, answer.size() - came, 0);
    if (more == 0) throw std::runtime_error("connection closed by peer");
    if (more > 0) came += static_cast<size_t>(more);
    if (more < 0 && errno != EAGAIN && errno != EINTR) throw std::runtime_error(text_of(errno));
  }
  if (!equal(answer, place.answer)) throw std::runtime_error("something else listens where it did");
  return connection;
}

// A connection that has not said yet which rank it is.
struct Stranger {
  Descriptor connection;
  Hello said{};
  size_t num_bytes = 0;
};

enum class Said : uint8_t { kNotAll, kHello, kNothing };

Said read_hello(Stranger& stranger, const Secret& question) {
  auto* said = reinterpret_cast<std::byte*>(&stranger.said);
  const ssize_t more = recv(stranger.connection.number(), said + stranger.num_bytes,
                            sizeof(Hello) - stranger.num_bytes, 0);
  if (more < 0 && (errno == EAGAIN || errno == EINTR)) return Said::kNotAll;
  if (more <= 0) return Said::kNothing;
  stranger.num_bytes += static_cast<size_t>(more);
  if (stranger.num_bytes < sizeof(Hello)) return Said::kNotAll;
  return equal(stranger.said.question, question) ? Said::kHello : Said::kNothing;
}

// Fills in the connections of the ranks that are `missing`.
void accept_ranks(const Descriptor& listener, const Place& place, const Connecting& how,
                  std::set<uint32_t> missing, std::vector<Descriptor>& connections) {
  std::list<Stranger> strangers;  // the oldest first
  while (!missing.empty()) {
    std::vector<pollfd> polled{{listener.number(), POLLIN, 0}};
    for (const Stranger& each : strangers) {
      polled.push_back({each.connection.number(), POLLIN, 0});
    }
    wait_for_any(polled, how, *missing.begin());
    auto ready = std::next(polled.begin());
    for (auto each = strangers.begin(); each != strangers.end(); ++ready) {
      const auto stranger = each++;
      if (ready->revents == 0) continue;
      const Said said = read_hello(*stranger, place.question);
      if (said == Said::kNotAll) continue;
      const uint32_t who = stranger->said.rank;
      if (said == Said::kHello && missing.erase(who) == 1) {
        try {
          send_all(stranger->connection.number(), place.answer.data(), place.answer.size());
        } catch (const std::runtime_error& error) {
          throw std::runtime_error("rank " + std::to_string(who) + ": " + error.what());
        }
        connections[who] = std::move(stranger->connection);
      }
      strangers.erase(stranger);
    }
    if (polled.front().revents == 0) continue;
    if (strangers.size() == std::max<size_t>(kMostStrangers, 2 * connections.size())) {
      strangers.pop_front();
    }
    Descriptor accepted(accept4(listener.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (accepted.number() >= 0) {
      strangers.push_back({std::move(accepted)});
    } else if (std::ranges::find(kGone, errno) == kGone.end()) {
      throw system_error("accept");
    }
  }
}

}  // namespace

bool is_out_of_files(const std::system_error& error) {
  return error.code() == std::errc::too_many_files_open ||
         error.code() == std::errc::too_many_files_open_in_system;
}

std::vector<Descriptor> connect_ranks(c10d::Store& store, const Connecting& how) {
  std::vector<Descriptor> connections(how.world_size);
  Place place{};
  const Descriptor listener = listen_on(how.number, place.address);
  place.question = random_secret();
  place.answer = random_secret();
  const Written written(store, key_of(how, how.rank), text_of(place));
  // Rank 0 accepts at once, and each rank when those below have answered it.
  std::vector<uint32_t> ranks = how.ranks;
  std::ranges::sort(ranks);
  std::set<uint32_t> above;
  for (const uint32_t other : ranks) {
    if (other > how.rank) above.insert(other);
    if (other >= how.rank) continue;
    const auto found = place_from(value_from(store, key_of(how, other), how, other), place.address);
    try {
      connections[other] = connect_to(found, other, how);
    } catch (const std::system_error&) {
      throw;  // of this rank
    } catch (const std::runtime_error& error) {
      const std::string name = "rank " + std::to_string(other);
      const std::string reason = error.what();
      throw std::runtime_error(reason.starts_with(name) ? reason : name + ": " + reason);
    }
  }
  accept_ranks(listener, place, how, std::move(above), connections);
  for (const Descriptor& connection : connections) {
    if (connection.number() < 0) continue;
    for (const auto& [level, name, value] : kSocketOptions) {
      if (setsockopt(connection.number(), level, name, &value, sizeof(value)) != 0) {
        throw system_error("setsockopt");
      }
    }
  }
  return connections;
}

}  // namespace gradferry
