#include "tests/faults/sim/fiber.h"

#include <cstdint>

#if !defined(__x86_64__)
#error "stack switching is written for x86-64"
#endif

#if defined(__SANITIZE_ADDRESS__)
extern "C" {
// Of the compiler's run-time library; declared here because its header comes with one compiler and
// not with another. NOLINTBEGIN(bugprone-reserved-identifier)
void __sanitizer_start_switch_fiber(void** fake_stack, const void* begin, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** begin, size_t* size);
// NOLINTEND(bugprone-reserved-identifier)
}
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

void SanitizedStack::before_switch([[maybe_unused]] SanitizedStack& next) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_stack_, next.begin_, next.size_);
#endif
}

void SanitizedStack::after_switch() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void SanitizedStack::enter([[maybe_unused]] SanitizedStack& previous) {
#if defined(__SANITIZE_ADDRESS__)
  const void* begin = nullptr;
  size_t size = 0;
  __sanitizer_finish_switch_fiber(nullptr, &begin, &size);
  if (previous.begin_ == nullptr) {
    previous.begin_ = begin;
    previous.size_ = size;
  }
#endif
}

}  // namespace gradferry::sim
