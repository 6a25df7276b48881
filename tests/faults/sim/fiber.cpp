#include "tests/faults/sim/fiber.h"

#include <cstdint>

#if !defined(__x86_64__)
#error "stack switching is written for x86-64"
#endif

asm(R"(
  .text
  .globl gradferry_switch_stack
  .type gradferry_switch_stack, @function
gradferry_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size gradferry_switch_stack, .-gradferry_switch_stack
)");

namespace gradferry::sim {

void* prepare_stack(std::byte* end, void (*entry)()) {
  // Six registers, the address that `ret` takes, and the place of a caller's return address: with
  // it the stack is aligned as a called function expects.
  auto* slots = reinterpret_cast<uintptr_t*>(end) - 8;
  for (int i = 0; i < 8; ++i) slots[i] = 0;
  slots[6] = reinterpret_cast<uintptr_t>(entry);
  return slots;
}

}  // namespace gradferry::sim
