// Connections between ranks, as threads of one process; and strangers among them.
#include "host/connect_ranks.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

// What the next socket() of this thread fails with; 0: it does not.
static thread_local int socket_error = 0;  // NOLINT(*-avoid-non-const-global-variables)

// In place of the C library's.
extern "C" int socket(int domain, int type, int protocol) noexcept {
  if (socket_error == 0) return static_cast<int>(syscall(SYS_socket, domain, type, protocol));
  errno = std::exchange(socket_error, 0);
  return -1;
}

namespace gradferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Connecting connecting(uint32_t rank, uint32_t world_size, milliseconds longest = seconds(60)) {
  Connecting how{.rank = rank,
                 .world_size = world_size,
                 .ranks = {},
                 .number = 0,
                 .deadline = now() + longest,
                 .between_polls = {}};
  for (uint32_t each = 0; each < world_size; ++each) how.ranks.push_back(each);
  return how;
}

size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

std::string error_of(c10d::Store& store, const Connecting& how) {
  try {
    connect_ranks(store, how);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(ConnectRanks, ConnectsEveryPairOnceAndLeavesNoKey) {
  constexpr uint32_t kRanks = 3;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::vector<Descriptor>> connections(kRanks);
  {
    std::vector<std::jthread> ranks;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back(
          [&, rank] { connections[rank] = connect_ranks(*store, connecting(rank, kRanks)); });
    }
  }
  for (uint32_t from = 0; from < kRanks; ++from) {
    for (uint32_t to = 0; to < kRanks; ++to) {
      ASSERT_EQ(connections[from][to].number() >= 0, from != to);
      if (from == to) continue;
      const auto said = static_cast<char>(10 * from + to);
      ASSERT_EQ(write(connections[from][to].number(), &said, 1), 1);
    }
  }
  for (uint32_t to = 0; to < kRanks; ++to) {
    for (uint32_t from = 0; from < kRanks; ++from) {
      if (from == to) continue;
      char heard = 0;
      while (read(connections[to][from].number(), &heard, 1) != 1) ASSERT_EQ(errno, EAGAIN);
      EXPECT_EQ(heard, static_cast<char>(10 * from + to));
    }
  }
  EXPECT_EQ(store->getNumKeys(), 0);
}

TEST(ConnectRanks, RankThatDoesNotComeIsNamedAndNothingStaysOpen) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const size_t before = open_files();
  EXPECT_EQ(error_of(*store, connecting(0, 2, milliseconds(50))), "rank 1 timed out");
  const auto empty = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(error_of(*empty, connecting(2, 3, milliseconds(50))), "rank 0 timed out");
  EXPECT_EQ(open_files(), before);
}

TEST(ConnectRanks, WaitEndsWithWhatIsThrownBetweenPolls) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  struct Interrupt : std::exception {};
  Connecting how = connecting(0, 2);
  how.between_polls = [] { throw Interrupt(); };
  EXPECT_THROW(connect_ranks(*store, how), Interrupt);
}

TEST(ConnectRanks, ListensOnTheInterfaceThatIsNamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  setenv("GLOO_SOCKET_IFNAME", "lo", 1);
  Connecting how = connecting(0, 2, milliseconds(150));
  std::string written;
  how.between_polls = [&] {
    const std::vector<uint8_t> value = store->get("0/0");
    written.assign(value.begin(), value.end());
  };
  EXPECT_EQ(error_of(*store, how), "rank 1 timed out");
  EXPECT_EQ(written.substr(0, 12), "4 127.0.0.1 ");
  EXPECT_EQ(store->getNumKeys(), 0);  // nobody listens there any more
  setenv("GLOO_SOCKET_IFNAME", "nothere", 1);
  EXPECT_EQ(error_of(*store, connecting(0, 2, milliseconds(50))),
            "GLOO_SOCKET_IFNAME: the network interface 'nothere' has no address to listen on; set "
            "GLOO_SOCKET_IFNAME");
  unsetenv("GLOO_SOCKET_IFNAME");
}

TEST(ConnectRanks, AddressOfAFamilyThatTheHostLacksIsPassedOver) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  socket_error = EAFNOSUPPORT;
  const std::string error = error_of(*store, connecting(0, 2, milliseconds(50)));
  // The host's name may lead to one address only.
  EXPECT_TRUE(error == "rank 1 timed out" || error.starts_with("the name of this host")) << error;
  socket_error = EMFILE;
  try {
    connect_ranks(*store, connecting(0, 2, milliseconds(50)));
    FAIL();
  } catch (const std::system_error& failure) {
    EXPECT_TRUE(is_out_of_files(failure));
  }
}

// Where rank 0 listens, once it does.
sockaddr_in place_of_rank_0(c10d::Store& store) {
  while (!store.check({"0/0"})) std::this_thread::yield();
  const std::vector<uint8_t> value = store.get("0/0");
  std::istringstream words(std::string(value.begin(), value.end()));
  std::string family, host;
  uint16_t port = 0;
  words >> family >> host >> port;
  EXPECT_EQ(family, "4");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  EXPECT_EQ(inet_pton(AF_INET, host.c_str(), &address.sin_addr), 1);
  return address;
}

Descriptor stranger(sockaddr_in address) {
  Descriptor connection(socket(AF_INET, SOCK_STREAM, 0));
  EXPECT_EQ(connect(connection.number(), reinterpret_cast<sockaddr*>(&address), sizeof(address)),
            0);
  return connection;
}

TEST(ConnectRanks, StrangersTakeNobodysPlace) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Descriptor> of_rank_0, of_rank_1;
  std::jthread rank_0([&] { of_rank_0 = connect_ranks(*store, connecting(0, 2)); });
  const sockaddr_in address = place_of_rank_0(*store);
  const Descriptor silent = stranger(address), half = stranger(address), liar = stranger(address);
  std::array<char, 20> wrong{};
  wrong[16] = 1;  // "I am rank 1", without the question
  EXPECT_EQ(send(half.number(), wrong.data(), 7, 0), 7);
  EXPECT_EQ(send(liar.number(), wrong.data(), wrong.size(), 0), 20);
  char answer = 0;
  EXPECT_EQ(recv(liar.number(), &answer, 1, 0), 0);  // it is sent away
  of_rank_1 = connect_ranks(*store, connecting(1, 2));
  rank_0.join();
  const char said = 'x';
  EXPECT_EQ(write(of_rank_1[0].number(), &said, 1), 1);
  while (read(of_rank_0[1].number(), &answer, 1) != 1) ASSERT_EQ(errno, EAGAIN);
  EXPECT_EQ(answer, said);
}

TEST(ConnectRanks, WhatStandsInTheStoreAndIsNoPlaceIsRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::string text = "4 127.0.0.1 99999 no secrets";
  store->set("0/0", std::vector<uint8_t>(text.begin(), text.end()));
  EXPECT_EQ(error_of(*store, connecting(1, 2)),
            "another rank runs another version of gradferry; install one on all ranks");
}

}  // namespace
}  // namespace gradferry
