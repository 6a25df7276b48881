// Shared memory of the emulator's blocks: which piece a block has of a kernel's static memory, and
// when storages of block-wide operations were used.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "tests/kernels/simt/machine.h"

namespace simt {

inline std::byte* map_memory(size_t num_bytes) {
  void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<std::byte*>(memory);
}

class BlockMemory {
 public:
  // Once, before the first block: to grow in the middle of one would move memory from thread to
  // thread. With two sets, blocks of the second one have their pieces in an arena.
  void reserve(bool two_sets) {
    if (two_sets && arena_ == nullptr) arena_ = map_memory(kArenaBytes);
    pieces_.reserve(kMostUses);
    used_storage_.reserve(kMostUses);
    shared_.reserve(kMostUses);
  }

  void begin_block(uint32_t set) {
    set_ = set;
    shared_.clear();
    shared_bytes_ = 0;
    used_storage_.clear();
  }

  // The block's piece of `memory`, filled with `fill` when the block first asks for it. Null if
  // there is no room: `error` says why.
  void* enter(void* memory, size_t num_bytes, uint8_t fill, const char** error) {
    for (const auto& [known, piece] : shared_) {
      if (known == memory) return piece;
    }
    shared_bytes_ += num_bytes;
    if (shared_bytes_ > kMostSharedBytes) {
      *error = "more than 48 KB of static shared memory";
      return nullptr;
    }
    void* piece = set_ == 0 ? memory : piece_for(memory, num_bytes);
    if (piece == nullptr) {
      *error = "all kernels together have more shared memory than the emulator";
      return nullptr;
    }
    shared_.emplace_back(memory, piece);
    auto* bytes = static_cast<volatile uint8_t*>(piece);
    for (size_t i = 0; i < num_bytes; ++i) bytes[i] = fill;
    return piece;
  }

  // Whether the storage may be used after so many barriers: there was one since its last use.
  bool use_storage(const void* storage, size_t num_bytes, uint64_t barriers) {
    const auto* begin = static_cast<const std::byte*>(storage);
    for (const UsedStorage& used : used_storage_) {
      if (used.barriers == barriers && begin < used.end && used.begin < begin + num_bytes) {
        return false;
      }
    }
    used_storage_.push_back({begin, begin + num_bytes, barriers});
    return true;
  }

 private:
  static constexpr size_t kArenaBytes = size_t{1} << 22;  // for all kernels
  static constexpr size_t kMostUses = 4096;  // of storages and memory, in a block, usually

  struct UsedStorage {
    const std::byte* begin;
    const std::byte* end;
    uint64_t barriers;  // passed when it was used
  };

  // Of the arena, what `memory` stands for.
  void* piece_for(void* memory, size_t num_bytes) {
    for (const auto& [known, piece] : pieces_) {
      if (known == memory) return piece;
    }
    if (arena_used_ + num_bytes > kArenaBytes) return nullptr;
    std::byte* piece = arena_ + arena_used_;
    arena_used_ += (num_bytes + 63) / 64 * 64;
    pieces_.emplace_back(memory, piece);
    return piece;
  }

  uint32_t set_ = 0;
  size_t shared_bytes_ = 0;
  std::vector<std::pair<const void*, void*>> shared_;  // and which piece the block has of it
  std::vector<UsedStorage> used_storage_;
  std::byte* arena_ = nullptr;
  size_t arena_used_ = 0;
  std::vector<std::pair<const void*, void*>> pieces_;  // of the arena
};

}  // namespace simt
