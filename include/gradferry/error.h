// The one exception type of the C++ library. Python sees a subclass of GradferryError per kind.
#pragma once

#include <stdexcept>
#include <string>

namespace gradferry {

// The kind of an error, and so the Python exception that is raised.
enum class ErrorKind {
  kConfig,        // ConfigError: an argument or option is wrong; nothing was changed
  kRankMismatch,  // RankMismatchError: ranks disagree on configuration or model layout
  kProtocol,      // ProtocolError: received bytes are not what the protocol demands
  kPeer,          // PeerError: another rank failed, left, or timed out
  kState,         // StateError: the object cannot do this in its present state
  kDiverged,      // DivergedError: parameters differ between ranks
};

// Every message says what is wrong, which value it is, and what to do about it.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace gradferry

// For data and arguments, in release builds too: throws Error(kind, message) when `condition` is
// false. The message is evaluated only then.
#define GRADFERRY_EXPECTS(condition, kind, message)                      \
  do {                                                                   \
    if (!(condition)) [[unlikely]] {                                     \
      throw ::gradferry::Error(::gradferry::ErrorKind::kind, (message)); \
    }                                                                    \
  } while (false)
