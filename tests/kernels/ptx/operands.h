// The operands of instructions, and the names that they use.
#pragma once

#include <map>
#include <ranges>
#include <unordered_map>

#include "tests/kernels/ptx/memory.h"
#include "tests/kernels/ptx/words.h"

namespace ptx {

constexpr Place in_bank(Bank bank, size_t word) {
  return static_cast<Place>(bank << kBankShift | word);
}

// An operand as it is written.
struct Operand {
  enum class Kind : uint8_t { kRegister, kNumber, kSymbol, kVector, kAddress } kind;
  Place place = kNone;   // of a register, also of an address
  Place second = kNone;  // of two registers, as d|p
  uint32_t bits = 0;     // of a register; 1: a predicate
  bool negated = false;
  uint64_t number = 0;  // or what is added to an address
  Text symbol = {};     // also of an address
  std::vector<Operand> parts = {};
};

// Width of a type such as "u32"; 1: a predicate.
inline uint32_t bits_of(Text type) {
  if (type == "pred") return 1;
  uint32_t bits = 0;
  if (!type.empty()) std::from_chars(type.data() + 1, type.data() + type.size(), bits);
  return bits;
}

class Operands : protected Words {
 protected:
  explicit Operands(Program& program) : Words(program.text), program_(program) {}

  static uint32_t words_for(uint32_t bits) { return bits == 64 ? 2 * kWarpLanes : kWarpLanes; }

  // Registers of a name and a number, such as %r<7>, lie side by side.
  struct Registers {
    uint32_t first, bits, count;
  };
  const Registers* find_registers(Text name) const {
    for (const auto& scope : std::views::reverse(registers_)) {
      if (const auto found = scope.find(name); found != scope.end()) return &found->second;
    }
    return nullptr;
  }
  bool find_register(Text name, Operand& operand) const {
    uint32_t number = 0;
    const Registers* found = find_registers(name);
    if (found == nullptr || found->count != 0) {
      const size_t digits = name.find_last_not_of("0123456789") + 1;
      std::from_chars(name.data() + digits, name.data() + name.size(), number);
      found = digits == name.size() ? nullptr : find_registers(name.substr(0, digits));
      if (found == nullptr || number >= found->count) return false;
    }
    operand.kind = Operand::Kind::kRegister;
    operand.place = in_bank(is_kernel_ ? kOfKernel : kOfFunctions,
                            found->first + number * words_for(found->bits));
    operand.bits = found->bits;
    return true;
  }
  bool find_special(Text name, Operand& operand) const {
    constexpr std::array<Text, 5> kNames = {"%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x",
                                            "%laneid"};
    const auto found = std::find(kNames.begin(), kNames.end(), name);
    if (found == kNames.end()) return false;
    operand.kind = Operand::Kind::kRegister;
    operand.place = in_bank(kSpecial, static_cast<size_t>(found - kNames.begin()) * kWarpLanes);
    operand.bits = 32;
    return true;
  }
  Operand register_operand(Text name) const {
    Operand operand{};
    if (!find_register(name, operand)) refuse("a register " + std::string(name) + " that is none");
    return operand;
  }

  Operand parse_operand() {
    Operand operand{Operand::Kind::kNumber};
    if (accept('!')) {
      operand = parse_operand();
      operand.negated = true;
      return operand;
    }
    if (accept('{')) {
      operand.kind = Operand::Kind::kVector;
      while (!accept('}')) {
        if (!accept(',')) operand.parts.push_back(parse_operand());
      }
      return operand;
    }
    if (accept('[')) {
      const Operand base = parse_operand();
      operand = base;
      operand.kind = Operand::Kind::kAddress;
      while (accept('+')) operand.number += parse_operand().number;
      expect(']');
      return operand;
    }
    if (accept('-')) {
      operand = parse_operand();
      operand.number = 0 - operand.number;
      return operand;
    }
    if (rest_.starts_with("0f") || rest_.starts_with("0d")) {  // bits of a float
      const Text word = next().substr(2);
      std::from_chars(word.data(), word.data() + word.size(), operand.number, 16);
      return operand;
    }
    if (rest_[0] >= '0' && rest_[0] <= '9') {
      operand.number = next_number();
      return operand;
    }
    const Text word = next();
    if (find_register(word, operand)) {
      if (accept('|')) operand.second = register_operand(next()).place;
      return operand;
    }
    if (find_special(word, operand)) return operand;
    operand.kind = Operand::Kind::kSymbol;
    operand.symbol = word;
    return operand;
  }

  // Where a source of so many bits is; narrower ones may be in wider registers of up to 32 bits.
  Place source(const Operand& operand, uint32_t bits) {
    if (operand.kind == Operand::Kind::kRegister) {
      if ((bits == 64) != (operand.bits == 64) || (bits == 1) != (operand.bits == 1)) {
        refuse("a source of another width");
      }
      return operand.place;
    }
    if (operand.kind == Operand::Kind::kSymbol) return constant(address_of(operand), bits);
    if (operand.kind != Operand::Kind::kNumber) refuse("a source that is none");
    const uint64_t mask = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
    return constant(bits == 1 && operand.number != 0 ? kAllLanes : operand.number & mask, bits);
  }
  Place destination(const Operand& operand, uint32_t bits) const {
    if (operand.kind != Operand::Kind::kRegister || (bits == 64) != (operand.bits == 64) ||
        (bits == 1) != (operand.bits == 1)) {
      refuse("a destination of another width");
    }
    return operand.place;
  }
  Place constant(uint64_t value, uint32_t bits) {
    const bool is_wide = bits == 64;
    const auto [found, is_new] = constants_.try_emplace({value, is_wide}, kNone);
    if (is_new) {
      found->second = in_bank(kConstants, program_.constants.size());
      for (uint32_t lane = 0; lane < kWarpLanes; ++lane) {
        program_.constants.push_back(static_cast<uint32_t>(value));
        if (is_wide) program_.constants.push_back(static_cast<uint32_t>(value >> 32));
      }
    }
    return found->second;
  }
  // An offset in shared memory, or where the kernel's parameter is.
  uint64_t address_of(const Operand& operand) const {
    if (const auto found = shared_.find(operand.symbol); found != shared_.end()) {
      return found->second.offset + operand.number;
    }
    if (const auto found = kernel_parameters_.find(operand.symbol);
        found != kernel_parameters_.end()) {
      return reinterpret_cast<uint64_t>(kernel_parameters()) + found->second.offset +
             operand.number;
    }
    refuse("the address of " + std::string(operand.symbol) + ", which the machine does not know");
  }
  const Variable* find_parameter(Text name) const {
    for (const auto& scope : std::views::reverse(parameters_)) {
      if (const auto found = scope.find(name); found != scope.end()) return &found->second;
    }
    return nullptr;
  }

  Program& program_;
  bool is_kernel_ = false;
  uint32_t num_words_ = 0;                                      // of registers of this function
  std::vector<std::unordered_map<Text, Registers>> registers_;  // by scope
  // Of functions and calls, by scope: in the memory of lanes.
  std::vector<std::unordered_map<Text, Variable>> parameters_;
  std::unordered_map<Text, Variable> kernel_parameters_, shared_;
  std::map<std::pair<uint64_t, bool>, Place> constants_;
};

}  // namespace ptx
