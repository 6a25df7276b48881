#include "host/listen.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "gradferry/error.h"

namespace gradferry {
namespace {

// IPv4 first, then IPv6, link-local ones last.
std::vector<Address> addresses_of_interface(const std::string& name) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw system_error("the network interfaces");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owned(first, &freeifaddrs);
  std::array<std::vector<Address>, 3> by_place;  // IPv4, IPv6, link-local
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || name != each->ifa_name) continue;
    const int family = each->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Address address;
    address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.storage, each->ifa_addr, address.size);
    const bool is_local = family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&address.v6().sin6_addr);
    by_place[is_local ? 2 : family == AF_INET6 ? 1 : 0].push_back(address);
  }
  std::vector<Address> found;
  for (const auto& addresses : by_place) {
    found.insert(found.end(), addresses.begin(), addresses.end());
  }
  return found;
}

// `reason`: why the name leads nowhere.
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

// Nothing where it cannot; then `reason` says why.
std::optional<Listener> listen_on(Address candidate, std::string& reason) {
  if (candidate.family() == AF_INET) candidate.v4().sin_port = 0;
  if (candidate.family() == AF_INET6) candidate.v6().sin6_port = 0;
  Listener listener;
  try {
    listener.socket = new_socket(candidate.family());
  } catch (const std::system_error& error) {
    if (is_out_of_files(error)) throw;
    reason = error.code().message();  // a host without that family
    return std::nullopt;
  }
  listener.address.size = sizeof(listener.address.storage);
  const int socket = listener.socket.number();
  if (bind(socket, candidate.get(), candidate.size) == 0 && listen(socket, SOMAXCONN) == 0 &&
      getsockname(socket, listener.address.get(), &listener.address.size) == 0) {
    return listener;
  }
  reason = system_error("listen").code().message();
  return std::nullopt;
}

// `what`: whose addresses they are. `reason`: why there are none.
Listener listen_on_first(const std::vector<Address>& candidates, const std::string& what,
                         std::string reason = "") {
  for (const Address& candidate : candidates) {
    if (auto listener = listen_on(candidate, reason)) return std::move(*listener);
  }
  throw Error(ErrorKind::kPeer,
              "cannot connect to the other ranks: " + what + " has no address to listen on" +
                  (reason.empty() ? "" : ": " + reason) + "; set GLOO_SOCKET_IFNAME");
}

// Takes the address that gloo would take, but loopback where the name does not lead to this
// machine.
Listener listen_on_host() {
  std::array<char, HOST_NAME_MAX + 1> host{};
  gethostname(host.data(), host.size() - 1);
  std::string reason;
  std::vector<Address> candidates = addresses_of_host(host.data(), reason);
  std::ranges::copy(addresses_of_host("127.0.0.1", reason), std::back_inserter(candidates));
  return listen_on_first(candidates, "the name of this host", reason);
}

}  // namespace

std::vector<Listener> listen_where_gloo_would(size_t most) {
  const char* names = std::getenv("GLOO_SOCKET_IFNAME");
  std::istringstream list(names == nullptr ? "" : names);
  std::vector<Listener> listeners;
  for (std::string name; listeners.size() < most && std::getline(list, name, ',');) {
    if (name.empty()) continue;
    listeners.push_back(listen_on_first(
        addresses_of_interface(name), "GLOO_SOCKET_IFNAME: the network interface '" + name + "'"));
  }
  if (listeners.empty()) listeners.push_back(listen_on_host());
  return listeners;
}

std::string text_of(Address address) {
  std::array<char, INET6_ADDRSTRLEN> host{};
  const bool is_v4 = address.family() == AF_INET;
  const void* bytes = is_v4 ? static_cast<const void*>(&address.v4().sin_addr)
                            : static_cast<const void*>(&address.v6().sin6_addr);
  inet_ntop(address.family(), bytes, host.data(), host.size());
  const uint16_t port = is_v4 ? address.v4().sin_port : address.v6().sin6_port;
  return std::string(is_v4 ? "4 " : "6 ") + host.data() + " " + std::to_string(ntohs(port));
}

Address address_from(std::istream& words, Address own) {
  int family = 0;
  uint16_t port = 0;
  std::string host;
  words >> family >> host >> port;
  if (!words || (family != 4 && family != 6)) throw std::invalid_argument("no address");
  Address address;
  void* bytes = nullptr;
  if (family == 4) {
    sockaddr_in& v4 = address.v4();
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    address.size = sizeof(v4);
    bytes = &v4.sin_addr;
  } else {
    sockaddr_in6& v6 = address.v6();
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    if (own.family() == AF_INET6) v6.sin6_scope_id = own.v6().sin6_scope_id;
    address.size = sizeof(v6);
    bytes = &v6.sin6_addr;
  }
  if (inet_pton(address.family(), host.c_str(), bytes) != 1) {
    throw std::invalid_argument("no address");
  }
  return address;
}

Descriptor new_socket(int family) {
  Descriptor made(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (made.number() < 0) throw system_error("socket");
  return made;
}

std::system_error system_error(const std::string& call) {
  return {errno, std::generic_category(), call};
}

bool is_out_of_files(const std::system_error& error) {
  return error.code() == std::errc::too_many_files_open ||
         error.code() == std::errc::too_many_files_open_in_system;
}

}  // namespace gradferry
