// What a world is made of, as a row of small numbers: drawn from a seed, or given. 0 is always the
// simplest choice, so a world shrinks by making its numbers smaller.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gradferry::sim {

// splitmix64: of every state another number, all equally likely.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  // The same for the same numbers.
  template <typename... Numbers>
  static Random of(Numbers... numbers) {
    Random mixed(0x6a09e667f3bcc909);
    ((mixed.state_ = mixed.next() ^ static_cast<uint64_t>(numbers)), ...);
    return mixed;
  }

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // Below `n`. The bias of the remainder does not matter here.
  uint64_t below(uint64_t n) { return n < 2 ? 0 : next() % n; }

 private:
  uint64_t state_;
};

class Choices {
 public:
  explicit Choices(uint64_t seed) : random_(seed), draws_(true) {}
  // Makes these again. Beyond their end, and where one is too large, the next smaller possible one.
  explicit Choices(std::vector<uint32_t> given)
      : random_(0), draws_(false), given_(std::move(given)) {}

  // One of `n` numbers from 0.
  uint32_t below(uint32_t n) {
    uint32_t choice = 0;
    if (draws_) {
      choice = static_cast<uint32_t>(random_.below(n));
    } else if (made_.size() < given_.size()) {
      choice = std::min(given_[made_.size()], n - 1);
    }
    made_.push_back(choice);
    return choice;
  }
  // True with probability 1 / n.
  bool one_in(uint32_t n) { return below(n) == n - 1; }
  template <typename T, size_t kSize>
  const T& pick(const std::array<T, kSize>& from) {
    return from[below(kSize)];
  }

  const std::vector<uint32_t>& made() const { return made_; }

 private:
  Random random_;
  bool draws_;
  std::vector<uint32_t> given_, made_;
};

}  // namespace gradferry::sim
