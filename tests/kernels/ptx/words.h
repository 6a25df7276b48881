// The words of a module's text.
#pragma once

#include <algorithm>
#include <charconv>

#include "tests/kernels/ptx/machine.h"

namespace ptx {

using Text = std::string_view;

class Words {
 protected:
  explicit Words(Text text) : rest_(text) {}

  [[noreturn]] void refuse(const std::string& what) const {
    throw Fault("line " + std::to_string(statement_) + " of PTX has " + what);
  }

  void skip_space() {
    while (!rest_.empty()) {
      if (rest_.starts_with("//")) {
        rest_.remove_prefix(std::min(rest_.find('\n'), rest_.size()));
      } else if (Text(" \t\r\n").find(rest_[0]) != Text::npos) {
        line_ += rest_[0] == '\n' ? 1 : 0;
        rest_.remove_prefix(1);
      } else {
        return;
      }
    }
  }
  // A name or number, or a single character.
  Text next() {
    const auto is_part = [](char c) {
      return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
             c == '_' || c == '$' || c == '.' || c == '%';
    };
    size_t size = 0;
    while (size < rest_.size() && is_part(rest_[size])) ++size;
    const Text word = rest_.substr(0, std::max<size_t>(size, 1));
    if (word.empty()) refuse("its end too early");
    rest_.remove_prefix(word.size());
    skip_space();
    return word;
  }
  bool accept(char c) {
    if (rest_.empty() || rest_[0] != c) return false;
    rest_.remove_prefix(1);
    skip_space();
    return true;
  }
  void expect(char c) {
    if (!accept(c)) refuse(std::string("no ") + c + " where one belongs");
  }
  uint64_t next_number() {
    const Text word = next();
    const bool is_hex = word.starts_with("0x");
    uint64_t number = 0;
    const char* begin = word.data() + (is_hex ? 2 : 0);
    std::from_chars(begin, word.data() + word.size(), number, is_hex ? 16 : 10);
    return number;
  }

  Text rest_;
  uint32_t line_ = 1, statement_ = 1;  // where the rest, and what is being parsed, begin
};

}  // namespace ptx
