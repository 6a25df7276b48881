// Texts in a store.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace gradferry {

// Nothing if the key does not exist, for which Store::get() would wait.
inline std::optional<std::string> read_text(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  const std::vector<uint8_t> value = store.get(key);
  return std::string(value.begin(), value.end());
}

inline void write_text(c10d::Store& store, const std::string& key, const std::string& text) {
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

// Removes keys that nobody reads any more. They stay in a store that cannot, or does not answer.
inline void forget_keys(c10d::Store& store, const std::vector<std::string>& keys) noexcept {
  try {
    for (const std::string& key : keys) store.deleteKey(key);
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace gradferry
