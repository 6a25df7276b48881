// The input of a fuzz target, read as numbers. What is missing at its end reads as zeros.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace gradferry::fuzzing {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : left_(data, size) {}

  bool empty() const { return left_.empty(); }
  size_t size() const { return left_.size(); }

  template <typename T>
  T take() {
    T value{};
    take(&value, sizeof(value));
    return value;
  }
  // Below `count`, which is at most 65536.
  uint32_t below(size_t count) {
    const uint32_t value = count <= 256 ? take<uint8_t>() : take<uint16_t>();
    return static_cast<uint32_t>(value % count);
  }
  bool flip() { return below(2) != 0; }
  void take(void* place, size_t num_bytes) {
    const size_t n = std::min(num_bytes, left_.size());
    if (n != 0) std::memcpy(place, left_.data(), n);
    if (n != num_bytes) std::memset(static_cast<uint8_t*>(place) + n, 0, num_bytes - n);
    left_ = left_.subspan(n);
  }
  std::string rest() {
    const std::string text(reinterpret_cast<const char*>(left_.data()), left_.size());
    left_ = {};
    return text;
  }
  // Overwrites some of the bytes at `place`: as many as the input says, where it says.
  void damage(std::byte* place, size_t num_bytes) {
    if (num_bytes == 0) return;
    for (uint32_t count = below(16); count > 0 && !empty(); --count) {
      const size_t at = take<uint32_t>() % num_bytes;
      place[at] = take<std::byte>();
    }
  }

 private:
  std::span<const uint8_t> left_;
};

}  // namespace gradferry::fuzzing
