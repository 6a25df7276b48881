// Fails one allocation of the native module: preloaded, it stands before operator new and
// posix_memalign, and counts calls that the module makes, directly or through other libraries.
//
// fail_allocation(n) has the n-th of them fail from now on, once; 0: none. It returns how many
// there were since the last call.
//
// Where the process ends because of one, stderr has the stack.
#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

namespace {

std::atomic<long> failing{0};
std::atomic<long> seen{0};
std::atomic<uintptr_t> begin{0}, end{0};
thread_local bool looking = false;

int find_module(dl_phdr_info* info, size_t, void*) {
  if (std::strstr(info->dlpi_name, "gradferry/_native") == nullptr) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    begin = info->dlpi_addr + part.p_vaddr;
    end = begin + part.p_memsz;
  }
  return 1;
}

// Whether this allocation is the one to fail.
bool fails() {
  const long n = failing.load(std::memory_order_relaxed);
  if (n == 0 || looking) return false;
  looking = true;
  void* frames[48];
  const int depth = backtrace(frames, 48);
  bool is_ours = false;
  for (int i = 0; i < depth && !is_ours; ++i) {
    const auto place = reinterpret_cast<uintptr_t>(frames[i]);
    is_ours = begin <= place && place < end;
  }
  looking = false;
  return is_ours && ++seen == n;
}

[[noreturn]] void show_stack() {
  looking = true;
  void* frames[48];
  backtrace_symbols_fd(frames, backtrace(frames, 48), STDERR_FILENO);
  std::abort();
}

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" long fail_allocation(long n) {
  dl_iterate_phdr(find_module, nullptr);
  std::set_terminate(show_stack);
  failing = 0;
  const long were = seen.exchange(0);
  failing = n;
  return were;
}

void* operator new(size_t size) {
  static auto* const real = next<void*(size_t)>("_Znwm");
  if (fails()) throw std::bad_alloc();
  return real(size);
}

extern "C" int posix_memalign(void** place, size_t alignment, size_t size) {
  static auto* const real = next<int(void**, size_t, size_t)>("posix_memalign");
  return fails() ? ENOMEM : real(place, alignment, size);
}
