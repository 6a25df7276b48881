// From the text of a module to operations: declarations, names, and what instructions consist of.
// It knows what nvcc emits for this project's kernels, and refuses everything else by line.
#include <algorithm>
#include <charconv>
#include <optional>

#include "tests/kernels/ptx/arithmetic.h"
#include "tests/kernels/ptx/memory.h"
#include "tests/kernels/ptx/operands.h"
#include "tests/kernels/ptx/warp_operations.h"

namespace ptx {
namespace {

std::vector<Text> split(Text name) {
  std::vector<Text> parts;
  for (;;) {
    const size_t dot = name.find('.');
    parts.push_back(name.substr(0, dot));
    if (dot == name.npos) return parts;
    name.remove_prefix(dot + 1);
  }
}

size_t align_up(size_t offset, size_t align) { return (offset + align - 1) / align * align; }

// The value of the only one of these names that is among the parts of an instruction.
template <typename E>
std::optional<uint8_t> find_one(const std::vector<Text>& parts,
                                std::initializer_list<std::pair<Text, E>> names) {
  for (const auto& [name, value] : names) {
    if (std::find(parts.begin(), parts.end(), name) != parts.end()) return uint8_t(value);
  }
  return std::nullopt;
}

class Parser : Operands {
 public:
  explicit Parser(Program& program) : Operands(program) {}

  void parse_module() {
    skip_space();
    while (!rest_.empty()) {
      statement_ = line_;
      const Text word = next();
      if (word == ".version" || word == ".target" || word == ".address_size") {
        (void)next();
      } else if (word == ".entry" || word == ".func") {
        parse_function(word == ".entry");
      } else if (word == ".global" || word == ".shared") {
        parse_variable(word);
      } else if (word != ".visible" && word != ".extern" && word != ".weak" && word != ";") {
        refuse("a declaration " + std::string(word) + " that the machine does not know");
      }
    }
    for (const Call& call : program_.calls) {
      if (!call.callee->is_defined)
        refuse("a call of " + call.callee->name + ", which is not here");
    }
    program_.lane_bytes = align_up(program_.lane_bytes, 16);
  }

 private:
  // --- declarations

  // [.align N] .type name [bytes]: after the state space.
  std::pair<Text, Variable> parse_declaration() {
    Variable variable;
    Text word = next();
    size_t align = 0;
    if (word == ".align") {
      align = next_number();
      word = next();
    }
    variable.size = bits_of(word.substr(1)) / 8;
    variable.align = align != 0 ? align : variable.size;
    Text name = next();
    if (name == ".ptr") {  // what it points to
      while ((name = next()).starts_with('.')) {
        if (name == ".align") (void)next();
      }
    }
    if (accept('[')) {
      variable.size *= next_number();
      expect(']');
    }
    return {name, variable};
  }
  void parse_variable(Text space) {
    auto [name, variable] = parse_declaration();
    expect(';');                     // initial values are refused
    if (space == ".global") return;  // of the C++ library; an operand that names one is refused
    variable.offset = align_up(program_.shared_bytes, variable.align);
    program_.shared_bytes = variable.offset + variable.size;
    shared_[name] = variable;
  }

  std::vector<Variable> parse_parameters(bool is_kernel, size_t& end) {
    std::vector<Variable> list;
    if (!accept('(')) return list;
    while (!accept(')')) {
      if (accept(',')) continue;
      if (next() != ".param") refuse("a parameter that is none");
      auto [name, variable] = parse_declaration();
      variable.offset = align_up(end, is_kernel ? variable.align : 16);
      end = variable.offset + variable.size;
      (is_kernel ? kernel_parameters_ : parameters_.back())[name] = variable;
      list.push_back(variable);
    }
    return list;
  }

  void parse_function(bool is_kernel) {
    kernel_parameters_.clear();
    parameters_.assign(1, {});
    registers_.assign(1, {});
    labels_.clear();
    branches_.clear();
    size_t kernel_end = 0;
    size_t& end = is_kernel ? kernel_end : program_.lane_bytes;
    std::vector<Variable> results = parse_parameters(is_kernel, end);
    const std::string name(next());
    std::vector<Variable> parameters = parse_parameters(is_kernel, end);
    if (kernel_end > kParameterBytes) refuse("a kernel with too many parameters");
    Function& function = program_.functions[name];
    while (rest_.starts_with('.')) {
      const Text word = next();
      if (word == ".maxntid") {
        function.max_threads = static_cast<uint32_t>(next_number());
        while (accept(',')) (void)next();
      } else if (word == ".minnctapersm") {
        (void)next();
      } else if (word != ".noreturn") {
        refuse("a directive " + std::string(word) + " that the machine does not know");
      }
    }
    function.name = name;
    function.is_kernel = is_kernel;
    if (accept(';')) return;
    function.is_defined = true;
    function.parameters = std::move(parameters);
    function.results = std::move(results);
    function.start = static_cast<uint32_t>(program_.code.size());
    is_kernel_ = is_kernel;
    // Kernels do not call each other: their registers lie in the same place.
    num_words_ = is_kernel ? 0 : program_.function_words;
    expect('{');
    parse_body();
    for (const auto& [at, label] : branches_) {
      const auto found = labels_.find(label);
      if (found == labels_.end())
        refuse("a branch to " + std::string(label) + ", which is nowhere");
      program_.code[at].target = found->second;
    }
    add({.kind = Kind::kReturn, .line = line_});
    uint32_t& words = is_kernel ? program_.kernel_words : program_.function_words;
    words = std::max(words, num_words_);
  }

  void parse_body() {
    for (int depth = 1; depth > 0;) {
      if (accept('{')) {
        ++depth;
        parameters_.emplace_back();
        registers_.emplace_back();
        continue;
      }
      if (accept('}')) {
        --depth;
        parameters_.pop_back();
        registers_.pop_back();
        continue;
      }
      if (accept(';')) continue;
      statement_ = line_;
      Op op{.line = line_};
      if (accept('@')) {
        op.negated = accept('!');
        op.guard = register_operand(next()).place;
      }
      const Text word = next();
      if (word.starts_with('.')) {
        parse_directive(word);
      } else if (accept(':')) {
        labels_[word] = static_cast<uint32_t>(program_.code.size());
      } else {
        parse_instruction(word, op);
      }
    }
  }
  void parse_directive(Text word) {
    if (word == ".reg") {
      const uint32_t bits = bits_of(next().substr(1));
      do {
        const Text name = next();
        uint32_t count = 0;  // 0: one register of that name
        if (accept('<')) {
          count = static_cast<uint32_t>(next_number());
          expect('>');
        }
        registers_.back()[name] = {num_words_, bits, count};
        num_words_ += (count == 0 ? 1 : count) * words_for(bits);
      } while (accept(','));
      expect(';');
    } else if (word == ".param") {
      auto [name, variable] = parse_declaration();
      expect(';');
      variable.offset = align_up(program_.lane_bytes, 16);
      program_.lane_bytes = variable.offset + variable.size;
      parameters_.back()[name] = variable;
    } else if (word == ".shared") {
      parse_variable(word);
    } else if (word == ".pragma" || word == ".loc") {
      while (next() != ";") {
      }
    } else {
      refuse("a directive " + std::string(word) + " that the machine does not know");
    }
  }

  // --- instructions

  void add(const Op& op) { program_.code.push_back(op); }

  void parse_instruction(Text name, Op op) {
    const std::vector<Text> parts = split(name);
    if (parts[0] == "bra") {
      branches_.emplace_back(program_.code.size(), next());
      expect(';');
      op.kind = Kind::kBranch;
      return add(op);
    }
    if (parts[0] == "call") return parse_call(op);
    // The one that says so by the name of its destination.
    if (name == "fma.rn.f32" && rest_.starts_with("exact,")) name = "fma.exact.f32";
    std::vector<Operand> operands;
    while (!accept(';')) {
      if (!accept(',')) operands.push_back(parse_operand());
    }
    build(name, parts, operands, op);
    add(op);
  }

  void parse_call(Op op) {
    Call call;
    const auto variables = [&] {
      std::vector<Variable> list;
      while (!accept(')')) {
        if (accept(',')) continue;
        const Text name = next();
        const Variable* found = find_parameter(name);
        if (found == nullptr) refuse("an argument " + std::string(name) + " that is none");
        list.push_back(*found);
      }
      return list;
    };
    if (accept('(')) {
      call.results = variables();
      expect(',');
    }
    const auto callee = program_.functions.find(next());
    if (callee == program_.functions.end()) refuse("a call of a function that is not declared");
    call.callee = &callee->second;
    if (accept(',')) {
      expect('(');
      call.arguments = variables();
    }
    expect(';');
    op.kind = Kind::kCall;
    op.target = static_cast<uint32_t>(program_.calls.size());
    program_.calls.push_back(std::move(call));
    add(op);
  }

  void build(Text name, const std::vector<Text>& parts, const std::vector<Operand>& operands,
             Op& op) {
    const bool is_known = build_memory(parts, operands, op) || build_move(parts, operands, op) ||
                          build_warp_operation(parts, operands, op) ||
                          build_barrier(name, operands, op);
    if (is_known) return;
    const Instruction* instruction = find_instruction(name);
    if (instruction == nullptr || operands.size() != 1u + instruction->num_sources) {
      refuse("an instruction " + std::string(name) + " that the machine does not know");
    }
    op.run = instruction->run;
    op.d = destination(operands[0], instruction->destination_bits);
    for (size_t i = 0; i < instruction->num_sources; ++i) {
      op.s[i] = source(operands[1 + i], instruction->source_bits[i]);
    }
  }

  // The registers of a vector, or the only one.
  void set_registers(const Operand& operand, uint32_t bits, Op& op) {
    const bool is_vector = operand.kind == Operand::Kind::kVector;
    op.count = static_cast<uint8_t>(is_vector ? operand.parts.size() : 1);
    if (op.count > op.v.size()) refuse("a vector of too many registers");
    for (size_t k = 0; k < op.count; ++k) {
      const Operand& part = is_vector ? operand.parts[k] : operand;
      if (part.kind == Operand::Kind::kSymbol && part.symbol == "_") continue;
      const bool is_register = part.kind == Operand::Kind::kRegister;
      op.v[k] = is_register ? part.place : source(part, bits);
      op.width[k] = static_cast<uint8_t>(is_register ? part.bits : std::max(bits, 32u));
    }
  }

  // atom[.semantics.scope].space.operation.type: of the scopes that of the device, .relaxed
  // without.
  void set_order(std::vector<Text>& parts, Op& op) {
    if (parts.size() != 6) return;
    op.acquires = parts[1] == "acquire" || parts[1] == "acq_rel";
    op.releases = parts[1] == "release" || parts[1] == "acq_rel";
    if ((!op.acquires && !op.releases) || parts[2] != "gpu") refuse("an unknown atomic operation");
    parts.erase(parts.begin() + 1, parts.begin() + 3);
  }

  bool build_memory(std::vector<Text> parts, const std::vector<Operand>& operands, Op& op) {
    const bool is_load = parts[0] == "ld", is_atomic = parts[0] == "atom";
    if (!is_load && !is_atomic && parts[0] != "st") return false;
    const Text type = parts.back();
    const uint32_t bits = bits_of(type);
    op.element_bits = static_cast<uint8_t>(bits);
    op.is_signed = is_load && type.starts_with('s');
    if (is_atomic) {
      op.run = &atomic;
      set_order(parts, op);
      const auto sub = find_one<Atomic>(
          parts, {{"add", Atomic::kAdd}, {"inc", Atomic::kInc}, {"or", Atomic::kOr}});
      if (!sub || operands.size() != 3 || type.starts_with('f'))
        refuse("an unknown atomic operation");
      op.sub = *sub;
      op.d = destination(operands[0], bits);
      op.s[1] = source(operands[2], bits);
    } else {
      op.run = is_load ? &load : &store;
      if (operands.size() != 2) refuse("an access of memory with other operands");
      set_registers(operands[is_load ? 0 : 1], bits, op);
    }
    set_address(parts[1], operands[is_load || is_atomic ? 1 : 0], op);
    return true;
  }
  void set_address(Text space, const Operand& address, Op& op) {
    if (address.kind != Operand::Kind::kAddress) refuse("an address that is none");
    op.offset = static_cast<int64_t>(address.number);
    if (address.place != kNone) op.s[0] = address.place;
    const bool is_named = !address.symbol.empty();
    if (space == "shared") {
      op.space = Space::kShared;
      if (address.bits == 64) refuse("an address of shared memory with 64 bits");
      if (is_named) op.offset = static_cast<int64_t>(address_of(address));
    } else if (space == "param" && is_named) {
      if (const Variable* found = find_parameter(address.symbol); found != nullptr) {
        op.space = Space::kParameter;
        op.offset += static_cast<int64_t>(found->offset);
      } else {
        op.offset = static_cast<int64_t>(address_of(address));
      }
    } else if ((space != "global" && space != "param") || is_named || address.bits != 64) {
      refuse("an address in a space " + std::string(space) + " that the machine does not know");
    }
  }

  // Between a register and the parts of a wider one.
  bool build_move(const std::vector<Text>& parts, const std::vector<Operand>& operands, Op& op) {
    if (parts[0] != "mov" || operands.size() != 2) return false;
    const bool splits = operands[0].kind == Operand::Kind::kVector;
    if (!splits && operands[1].kind != Operand::Kind::kVector) return false;
    const uint32_t bits = bits_of(parts.back());
    const Operand& vector = operands[splits ? 0 : 1];
    op.element_bits = static_cast<uint8_t>(bits / vector.parts.size());
    set_registers(vector, op.element_bits, op);
    op.width[0] = static_cast<uint8_t>(bits);
    if (splits) {
      op.run = &split_register;
      op.s[0] = source(operands[1], bits);
    } else {
      op.run = &join_registers;
      op.d = destination(operands[0], bits);
    }
    return true;
  }

  // The mask of members is the last operand.
  bool build_warp_operation(const std::vector<Text>& parts, const std::vector<Operand>& operands,
                            Op& op) {
    const Text name = parts[0];
    std::optional<uint8_t> sub;
    uint32_t bits = 32;
    if (name == "shfl") {
      op.run = &shuffle;
      sub = find_one<Shuffle>(parts, {{"up", Shuffle::kUp},
                                      {"down", Shuffle::kDown},
                                      {"bfly", Shuffle::kButterfly},
                                      {"idx", Shuffle::kIndex}});
    } else if (name == "vote") {
      op.run = &vote;
      bits = 1;
      sub = find_one<Vote>(parts, {{"all", Vote::kAll}, {"any", Vote::kAny}});
    } else if (name == "redux") {
      op.run = &redux;
      sub = find_one<Redux>(
          parts,
          {{"add", Redux::kAdd}, {"min", Redux::kMin}, {"max", Redux::kMax}, {"or", Redux::kOr}});
      if (parts.back().starts_with('s')) sub.reset();
    } else {
      return false;
    }
    const size_t num_sources = name == "shfl" ? 3 : 1;
    if (!sub || operands.size() != 2 + num_sources) refuse("an unknown operation of a warp");
    op.kind = Kind::kWarpSync;
    op.sub = *sub;
    op.d = destination(operands[0], bits);
    op.d2 = operands[0].second;
    op.is_signed = operands[1].negated;
    for (size_t i = 0; i < num_sources; ++i) op.s[i] = source(operands[1 + i], bits);
    op.s[3] = source(operands.back(), 32);
    return true;
  }

  bool build_barrier(Text name, const std::vector<Operand>& operands, Op& op) {
    if (name == "ret" || name == "exit") {
      op.kind = Kind::kReturn;
    } else if (name == "bar.warp.sync" && operands.size() == 1) {
      op.kind = Kind::kWarpSync;
      op.run = &warp_barrier;
      op.s[3] = source(operands[0], 32);
    } else if (name == "bar.sync" && operands.size() == 1 && is_barrier_0(operands[0])) {
      op.kind = Kind::kBarrier;
    } else if ((name == "bar.red.and.pred" || name == "bar.red.or.pred") && operands.size() == 3 &&
               is_barrier_0(operands[1])) {
      op.kind = Kind::kBarrier;
      op.sub = name == "bar.red.and.pred" ? 1 : 0;
      op.d = destination(operands[0], 1);
      op.s[0] = source(operands[2], 1);
      op.is_signed = operands[2].negated;
    } else {
      return false;
    }
    return true;
  }
  static bool is_barrier_0(const Operand& operand) {
    return operand.kind == Operand::Kind::kNumber && operand.number == 0;
  }

  std::unordered_map<Text, uint32_t> labels_;
  std::vector<std::pair<size_t, Text>> branches_;
};

}  // namespace

std::unique_ptr<Program> parse(Text text) {
  auto program = std::make_unique<Program>();
  program->text = text;
  Parser(*program).parse_module();
  return program;
}

}  // namespace ptx
