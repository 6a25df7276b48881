// Memory that the ranks of one node have in common: what siblings give each other lies in it, and
// only headers travel on their lanes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace gradferry {

class SharedMemory : public std::enable_shared_from_this<SharedMemory> {
 public:
  // Maps a memfd, which stays the caller's. Throws Error(kPeer) unless its size is `num_bytes` and
  // sealed: memory that another process cuts off would end this one with SIGBUS. Throws also if it
  // cannot be mapped. All of it must be allocated.
  SharedMemory(int descriptor, uint64_t num_bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  uint64_t num_bytes() const { return num_bytes_; }
  // uint8, of one dimension. Holds the memory.
  at::Tensor part(uint64_t offset, uint64_t num_bytes);

 private:
  const uint64_t num_bytes_;
  const int process_id_;
  void* memory_;
};

}  // namespace gradferry
