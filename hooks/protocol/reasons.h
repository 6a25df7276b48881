// Why something between ranks failed, read from texts of gloo, of torch's stores and of the system.
// Nothing else reads them.
#pragma once

#include <cstdint>
#include <string>

namespace gradferry {

enum class Reason : uint8_t {
  kClosed,   // the other end closed the connection, or does not listen
  kTimeout,  // nothing came in time
  kOther,
};

inline Reason reason_of(const std::string& text) {
  const auto has = [&](const char* words) { return text.find(words) != std::string::npos; };
  if (has("by peer") || has("roken pipe") || has("efused")) return Reason::kClosed;
  return has("imed out") || has("imeout") ? Reason::kTimeout : Reason::kOther;
}

// Without the source locations, addresses and calls that gloo names.
inline std::string plain_reason(const std::string& text) {
  switch (reason_of(text)) {
    case Reason::kClosed: return "its connection was closed";
    case Reason::kTimeout: return "nothing came within the timeout";
    default: return text.substr(0, text.find('\n'));
  }
}

}  // namespace gradferry
