#include "tests/kernels/simt/kernels_on_host.h"
#include "tests/kernels/simt/machine.h"

namespace gradferry {

namespace emulated {
extern const ChunkKernels chunk_kernels;
extern const NodeKernels node_kernels;
extern const MessageKernels message_kernels;
}  // namespace emulated

namespace testing {

const ChunkKernels& chunk_kernels_on_host() { return emulated::chunk_kernels; }
const NodeKernels& node_kernels_on_host() { return emulated::node_kernels; }
const MessageKernels& message_kernels_on_host() { return emulated::message_kernels; }

bool kernels_are_emulated() { return true; }

bool kernels_are_sanitized() {
#if defined(SIMT_SANITIZED)
  return true;
#else
  return false;
#endif
}

void set_schedule(uint64_t seed) { simt::set_seed(seed); }

}  // namespace testing
}  // namespace gradferry
