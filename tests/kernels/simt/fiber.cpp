#include "tests/kernels/simt/fiber.h"

#include <cstdint>

#if !defined(__x86_64__)
#error "stack switching is written for x86-64"
#endif

// Compiled without -fsanitize=thread, so that switches are invisible to it, but told whether the
// kernels are (SIMT_TSAN).
extern "C" {
// Of the compiler's run-time libraries; declared here because their headers come with one compiler
// and not with another. NOLINTBEGIN(bugprone-reserved-identifier)
#if defined(SIMT_TSAN)
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_java_release_store(void* address);
#endif
#if defined(__SANITIZE_ADDRESS__)
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
void __sanitizer_start_switch_fiber(void** fake_stack, const void* begin, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** begin, size_t* size);
#endif
// NOLINTEND(bugprone-reserved-identifier)
}

asm(R"(
  .text
  .globl gradferry_simt_switch
  .type gradferry_simt_switch, @function
gradferry_simt_switch:
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
  .size gradferry_simt_switch, .-gradferry_simt_switch
)");

namespace simt {

void* prepare_stack(std::byte* end, void (*entry)()) {
  // Six registers, the address that `ret` takes, and the place of a caller's return address: with
  // it the stack is aligned as a called function expects.
  auto* slots = reinterpret_cast<uintptr_t*>(end) - 8;
  for (int i = 0; i < 8; ++i) slots[i] = 0;
  slots[6] = reinterpret_cast<uintptr_t>(entry);
  return slots;
}

void SanitizedStack::renew([[maybe_unused]] bool is_host) {
  fake_stack_ = nullptr;
#if defined(SIMT_TSAN)
  if (is_host) {
    tsan_fiber_ = __tsan_get_current_fiber();
  } else {
    if (tsan_fiber_ != nullptr) __tsan_destroy_fiber(tsan_fiber_);
    tsan_fiber_ = __tsan_create_fiber(0);
  }
#endif
}

void SanitizedStack::begin_again([[maybe_unused]] const void* left_at) {
#if defined(__SANITIZE_ADDRESS__)
  const auto* const end = static_cast<const std::byte*>(begin_) + size_;
  const auto* const frames = static_cast<const std::byte*>(left_at);
  if (frames != nullptr) __asan_unpoison_memory_region(frames, static_cast<size_t>(end - frames));
#endif
}

void SanitizedStack::before_switch([[maybe_unused]] SanitizedStack& next) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_stack_, next.begin_, next.size_);
#endif
#if defined(SIMT_TSAN)
  constexpr unsigned kNoSynchronization = 1;
  __tsan_switch_to_fiber(next.tsan_fiber_, kNoSynchronization);
#endif
}

void SanitizedStack::after_switch([[maybe_unused]] SanitizedStack& previous) {
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

void synchronize_release([[maybe_unused]] void* address) {
#if defined(SIMT_TSAN)
  __tsan_release(address);
#endif
}
void synchronize_anew([[maybe_unused]] void* address) {
#if defined(SIMT_TSAN)
  __tsan_java_release_store(address);
#endif
}
void synchronize_acquire([[maybe_unused]] void* address) {
#if defined(SIMT_TSAN)
  __tsan_acquire(address);
#endif
}

}  // namespace simt
