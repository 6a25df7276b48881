// Connections between ranks, as threads of one process; and strangers among them.
#include "host/connect_ranks.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "host/listen.h"

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
  std::vector<uint32_t> everyone(world_size);
  std::iota(everyone.begin(), everyone.end(), 0);
  return {.rank = rank,
          .world_size = world_size,
          .world_ranks = {},
          .lanes = {everyone},
          .deadline = now() + longest,
          .between_polls = {}};
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

constexpr const char* kLookAtOthers =
    "; look at their errors first, then name a network interface that all can reach in "
    "GLOO_SOCKET_IFNAME";

std::string others(const std::string& reason) {
  return "the other ranks did not connect: " + reason + kLookAtOthers;
}

TEST(ConnectRanks, RankThatDoesNotComeIsNamedAndNothingStaysOpen) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const size_t before = open_files();
  EXPECT_EQ(error_of(*store, connecting(0, 2, milliseconds(50))), others("rank 1 timed out"));
  const auto empty = c10::make_intrusive<c10d::HashStore>();
  Connecting how = connecting(2, 3, milliseconds(50));
  EXPECT_EQ(error_of(*empty, how), others("rank 0 timed out"));
  how.world_ranks = {7, 8, 9};
  EXPECT_EQ(error_of(*empty, how), others("rank 7 timed out"));
  EXPECT_EQ(open_files(), before);
}

TEST(ConnectRanks, WaitEndsWithWhatIsThrownBetweenPolls) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  struct Interrupt : std::exception {};
  for (const uint32_t rank : {1U, 0U}) {  // it waits for the store, and for a connection
    Connecting how = connecting(rank, 2);
    how.between_polls = [] { throw Interrupt(); };
    const size_t before = open_files();
    EXPECT_THROW(connect_ranks(*store, how), Interrupt);
    EXPECT_EQ(open_files(), before);
  }
}

std::string text_at(c10d::Store& store, const std::string& key) {
  const std::vector<uint8_t> value = store.get(key);
  return {value.begin(), value.end()};
}

TEST(ConnectRanks, ListensOnTheInterfacesThatAreNamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  setenv("GLOO_SOCKET_IFNAME", "lo,lo,lo", 1);
  Connecting how = connecting(0, 2, milliseconds(50));
  how.lanes.push_back(how.lanes.front());
  EXPECT_EQ(error_of(*store, how), others("rank 1 timed out"));
  std::istringstream written(text_at(*store, "0"));
  std::vector<std::string> words;
  for (std::string word; written >> word;) words.push_back(word);
  ASSERT_EQ(words.size(), 8);  // an address for each lane, although three are listed
  for (const size_t first : {2, 5}) {
    EXPECT_EQ(words[first], "4");
    EXPECT_EQ(words[first + 1], "127.0.0.1");
  }
  EXPECT_NE(words[4], words[7]);
  setenv("GLOO_SOCKET_IFNAME", "nothere", 1);
  EXPECT_EQ(error_of(*store, connecting(0, 2, milliseconds(50))),
            "cannot connect to the other ranks: GLOO_SOCKET_IFNAME: the network interface "
            "'nothere' has no address to listen on; set GLOO_SOCKET_IFNAME");
  unsetenv("GLOO_SOCKET_IFNAME");
}

TEST(ConnectRanks, AddressOfAFamilyThatTheHostLacksIsPassedOver) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  socket_error = EAFNOSUPPORT;
  const std::string error = error_of(*store, connecting(0, 2, milliseconds(50)));
  // The host's name may lead to one address only.
  EXPECT_TRUE(error == others("rank 1 timed out") ||
              error.starts_with("cannot connect to the other ranks: the name of this host"))
      << error;
  socket_error = EMFILE;
  EXPECT_EQ(error_of(*store, connecting(0, 2, milliseconds(50))),
            "cannot connect to the other ranks: socket: Too many open files; raise the process's "
            "limit of open files (ulimit -n)");
}

TEST(ConnectRanks, LinkLocalAddressIsOnTheInterfaceOfThisRank) {
  std::istringstream words("6 fe80::1 5000 4 10.0.0.7 6000");
  Address own;
  own.v6().sin6_family = AF_INET6;
  own.v6().sin6_scope_id = 3;
  Address read = address_from(words, own);
  EXPECT_EQ(read.v6().sin6_scope_id, 3);
  EXPECT_EQ(text_of(read), "6 fe80::1 5000");
  EXPECT_EQ(text_of(address_from(words, own)), "4 10.0.0.7 6000");
}

// Where rank 0 listens, once it does.
Address place_of_rank_0(c10d::Store& store) {
  while (!store.check({"0"})) std::this_thread::yield();
  std::istringstream words(text_at(store, "0"));
  std::string question, answer;
  words >> question >> answer;
  return address_from(words, {});
}

Descriptor stranger(const Address& address) {
  Descriptor connection(socket(address.family(), SOCK_STREAM, 0));
  EXPECT_EQ(connect(connection.number(), address.get(), address.size), 0);
  return connection;
}

// Nothing more comes from it.
bool is_closed(const Descriptor& connection) {
  char byte = 0;
  return recv(connection.number(), &byte, 1, 0) == 0;
}

TEST(ConnectRanks, StrangersTakeNobodysPlace) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<LaneSockets> of_rank_0, of_rank_1;
  std::jthread rank_0([&] { of_rank_0 = connect_ranks(*store, connecting(0, 2)); });
  const Address address = place_of_rank_0(*store);
  const Descriptor silent = stranger(address), half = stranger(address), liar = stranger(address);
  std::array<char, 24> wrong{};
  wrong[16] = 1;  // "I am rank 1, on lane 0", without the question
  EXPECT_EQ(send(half.number(), wrong.data(), 7, 0), 7);
  EXPECT_EQ(send(liar.number(), wrong.data(), wrong.size(), 0), 24);
  EXPECT_TRUE(is_closed(liar));
  // Who reads the store is a rank, but not one that is not expected.
  const std::string question = text_at(*store, "0").substr(0, 32);
  for (size_t i = 0; i < 16; ++i) {
    wrong[i] = static_cast<char>(std::stoi(question.substr(2 * i, 2), nullptr, 16));
  }
  for (const auto& [rank, lane] : {std::pair<char, char>{2, 0}, {1, 1}, {0, 0}}) {
    wrong[16] = rank;
    wrong[20] = lane;
    const Descriptor guest = stranger(address);
    EXPECT_EQ(send(guest.number(), wrong.data(), wrong.size(), 0), 24);
    EXPECT_TRUE(is_closed(guest));
  }
  of_rank_1 = connect_ranks(*store, connecting(1, 2));
  rank_0.join();
  const char said = 'x';
  char heard = 0;
  EXPECT_EQ(write(of_rank_1[0].connections[0].number(), &said, 1), 1);
  while (read(of_rank_0[0].connections[1].number(), &heard, 1) != 1) ASSERT_EQ(errno, EAGAIN);
  EXPECT_EQ(heard, said);
}

TEST(ConnectRanks, OldestStrangerIsClosedWhereThereAreTooMany) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::jthread rank_0([&] { connect_ranks(*store, connecting(0, 2)); });
  const Address address = place_of_rank_0(*store);
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 65; ++i) strangers.push_back(stranger(address));
  EXPECT_TRUE(is_closed(strangers[0]));
  char byte = 0;
  EXPECT_EQ(recv(strangers[1].number(), &byte, 1, MSG_DONTWAIT), -1);
  connect_ranks(*store, connecting(1, 2));
}

// Rank 0 has written where it listens; something else listens there.
TEST(ConnectRanks, WrongAnswerIsRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::vector<Listener> listeners = listen_where_gloo_would(1);
  const std::string text =
      std::string(32, 'a') + " " + std::string(32, 'b') + " " + text_of(listeners[0].address);
  store->set("0", std::vector<uint8_t>(text.begin(), text.end()));
  std::jthread other([&] {
    pollfd polled{listeners[0].socket.number(), POLLIN, 0};
    ASSERT_EQ(poll(&polled, 1, -1), 1);
    const Descriptor accepted(accept(listeners[0].socket.number(), nullptr, nullptr));
    std::array<char, 24> hello{};
    ASSERT_EQ(recv(accepted.number(), hello.data(), hello.size(), MSG_WAITALL), 24);
    const std::string wrong(16, 'c');
    ASSERT_EQ(send(accepted.number(), wrong.data(), wrong.size(), 0), 16);
    is_closed(accepted);
  });
  EXPECT_EQ(
      error_of(*store, connecting(1, 2)),
      "cannot connect to the other ranks: rank 0: another program listens at its address now; look "
      "at the network of this rank's host");
}

TEST(ConnectRanks, RankThatIsGoneIsNamedAtOnce) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::string address = text_of(listen_where_gloo_would(1)[0].address);  // no longer
  const std::string text = std::string(32, 'a') + " " + std::string(32, 'b') + " " + address;
  store->set("0", std::vector<uint8_t>(text.begin(), text.end()));
  try {
    connect_ranks(*store, connecting(1, 2));
    FAIL();
  } catch (const EchoError& error) {
    EXPECT_EQ(error.what(), others("rank 0: Connection refused"));
  }
}

TEST(ConnectRanks, WhatStandsInTheStoreAndIsNoPlaceIsRefused) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::string secrets = std::string(32, 'a') + " " + std::string(32, 'b');
  for (const std::string& text : {std::string("4 127.0.0.1 99999 no secrets"), secrets,
                                  secrets + " 4 127.0.0.1 5000 5", secrets + " 4 nowhere 5000"}) {
    store->set("0", std::vector<uint8_t>(text.begin(), text.end()));
    EXPECT_EQ(error_of(*store, connecting(1, 2)),
              "another rank runs another version of gradferry; install the same on all ranks");
  }
}

}  // namespace
}  // namespace gradferry
