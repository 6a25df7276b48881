#include "host/shared_memory.h"

#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <system_error>

#include "gradferry/error.h"

namespace gradferry {
namespace {

std::string reason(const char* call) {
  return std::string(call) + ": " + std::generic_category().message(errno);
}

void check(int descriptor, uint64_t num_bytes) {
  constexpr int kSealed = F_SEAL_SHRINK | F_SEAL_GROW;
  const int seals = fcntl(descriptor, F_GET_SEALS);
  GRADFERRY_EXPECTS(seals >= 0, kPeer,
                    "the shared memory is not a memfd; " + reason("F_GET_SEALS"));
  GRADFERRY_EXPECTS((seals & kSealed) == kSealed, kPeer,
                    "the size of the shared memory is not sealed: its seals are " +
                        std::to_string(seals) + ", of which " + std::to_string(kSealed) +
                        " are needed");
  struct stat found{};
  GRADFERRY_EXPECTS(fstat(descriptor, &found) == 0, kPeer, reason("fstat"));
  GRADFERRY_EXPECTS(static_cast<uint64_t>(found.st_size) == num_bytes, kPeer,
                    "the shared memory has " + std::to_string(found.st_size) + " bytes, expected " +
                        std::to_string(num_bytes));
}

}  // namespace

SharedMemory::SharedMemory(int descriptor, uint64_t num_bytes)
    : num_bytes_(num_bytes), process_id_(getpid()) {
  check(descriptor, num_bytes);
  // Populated: no step waits for page tables.
  memory_ =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, 0);
  GRADFERRY_EXPECTS(memory_ != MAP_FAILED, kPeer, reason("mmap"));
  // A data loader that outlives the engine must not hold the memory.
  madvise(memory_, num_bytes, MADV_DONTFORK);
}

SharedMemory::~SharedMemory() {
  // What a fork has at this address is something else.
  if (getpid() == process_id_) munmap(memory_, num_bytes_);
}

at::Tensor SharedMemory::part(uint64_t offset, uint64_t num_bytes) {
  GRADFERRY_EXPECTS(offset <= num_bytes_ && num_bytes <= num_bytes_ - offset, kState,
                    "the shared memory has " + std::to_string(num_bytes_) +
                        " bytes; there are no " + std::to_string(num_bytes) + " at " +
                        std::to_string(offset));
  // Not a deleter of from_blob(): it takes memory where nothing may be thrown.
  using Held = std::shared_ptr<SharedMemory>;
  auto* const held = new Held(shared_from_this());
  return at::for_blob(static_cast<std::byte*>(memory_) + offset, {static_cast<int64_t>(num_bytes)})
      .context(held, [](void* each) { delete static_cast<Held*>(each); })
      .options(at::TensorOptions().dtype(at::kByte))
      .make_tensor();
}

}  // namespace gradferry
