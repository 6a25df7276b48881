// Sockets that listen where gloo would, and how their addresses stand in a store.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <istream>
#include <string>
#include <system_error>
#include <vector>

#include "host/sockets.h"

namespace gradferry {

// An address of a socket.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  sockaddr_in& v4() { return reinterpret_cast<sockaddr_in&>(storage); }
  sockaddr_in6& v6() { return reinterpret_cast<sockaddr_in6&>(storage); }
};

struct Listener {
  Descriptor socket;
  Address address;
};

// Listens on every network interface that GLOO_SOCKET_IFNAME lists, but on `most` at most; without
// that variable once, where the host's name leads to. Throws Error(kPeer) where there is no address
// to listen on, and std::system_error.
std::vector<Listener> listen_where_gloo_would(size_t most);

// "4 127.0.0.1 41234" or "6 fe80::1 41234"
std::string text_of(Address address);
// Reads that. `own`: where this rank listens; a link-local address of another is on the same
// interface. Throws std::invalid_argument.
Address address_from(std::istream& words, Address own);

// A stream socket that does not block.
Descriptor new_socket(int family);

// What errno says, of a call.
std::system_error system_error(const std::string& call);
// Whether this process, or its host, has no more files to open.
bool is_out_of_files(const std::system_error& error);

}  // namespace gradferry
