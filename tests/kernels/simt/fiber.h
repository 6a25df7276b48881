// Stacks that one thread of the host switches between. Written for x86-64: the registers a function
// must preserve are pushed, the stack pointer is exchanged, and they are popped again. No system
// call is involved, which is what makes emulating thousands of threads cheap.
#pragma once

#include <cstddef>

namespace simt {

// Saves where the running code is to *save, and continues where `to` was saved.
extern "C" void gradferry_simt_switch(void** save, void* to);

// Of a fresh stack that ends at `end`, a multiple of 16: what to give to gradferry_simt_switch, so
// that `entry`, which must not return, is called on it.
void* prepare_stack(std::byte* end, void (*entry)());

// Tells sanitizers about stacks: AddressSanitizer where one begins and ends, ThreadSanitizer that
// each is a thread of its own. Empty without them.
class SanitizedStack {
 public:
  // Of the host, whose bounds are found out at the first switch away from it.
  SanitizedStack() = default;
  SanitizedStack(std::byte* begin, size_t size) : begin_(begin), size_(size) {}

  // Forgets what an abandoned stack held.
  void renew(bool is_host);
  // Before the stack is prepared again: the functions that it held at `left_at`, the stack pointer
  // when it was left for good (null: it is new), will not return and clean up after themselves.
  void begin_again(const void* left_at);
  // Around gradferry_simt_switch: from `this` to `next`.
  void before_switch(SanitizedStack& next);
  void after_switch(SanitizedStack& previous);
  // First thing on a fresh stack, reached from `previous`.
  void enter(SanitizedStack& previous);

 private:
  // AddressSanitizer's
  [[maybe_unused]] const void* begin_ = nullptr;
  [[maybe_unused]] size_t size_ = 0;
  void* fake_stack_ = nullptr;
  // ThreadSanitizer's
  [[maybe_unused]] void* tsan_fiber_ = nullptr;
};

// What ThreadSanitizer takes for synchronization at `address`; nothing without it. Who acquires
// comes after all who released there, since the last of them who did so anew.
void synchronize_release(void* address);
void synchronize_anew(void* address);
void synchronize_acquire(void* address);

}  // namespace simt
