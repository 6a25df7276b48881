// Plays many worlds, in processes of their own, and makes one that fails as small as it can be.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradferry::sim {

struct Campaign {
  uint64_t first = 0;  // seed
  uint64_t worlds = 1000;
  uint64_t jobs = 1;
  uint64_t tries = 3000;  // to make one that fails smaller
};

// Stops at the first world that fails, and prints it. Returns whether none did.
bool play_all(const Campaign& campaign);
// Plays and prints one world. Returns whether all holds in it.
bool play_again(const std::vector<uint32_t>& choices);

}  // namespace gradferry::sim
