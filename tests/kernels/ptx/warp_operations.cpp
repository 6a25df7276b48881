#include "tests/kernels/ptx/warp_operations.h"

#include <algorithm>

namespace ptx {

// As the manual defines it: the lane's segment, and the last lane in it that can be read.
void shuffle(Context& c, const Op& op) {
  const uint32_t* value = words_of(c, op.s[0]);
  const uint32_t* by = words_of(c, op.s[1]);
  const uint32_t* clamp = words_of(c, op.s[2]);
  std::array<uint32_t, kWarpLanes> result{}, is_inside{};
  for_lanes(c.mask, [&](uint32_t lane) {
    const uint32_t b = by[lane] & 31, last = clamp[lane] & 31, segment = clamp[lane] >> 8 & 31;
    const auto most = static_cast<int32_t>((lane & segment) | (last & ~segment));
    const auto own = static_cast<int32_t>(lane);
    int32_t from = own;
    switch (static_cast<Shuffle>(op.sub)) {
      case Shuffle::kUp: from = own - static_cast<int32_t>(b); break;
      case Shuffle::kDown: from = own + static_cast<int32_t>(b); break;
      case Shuffle::kButterfly: from = static_cast<int32_t>(lane ^ b); break;
      case Shuffle::kIndex: from = static_cast<int32_t>((lane & segment) | (b & ~segment)); break;
    }
    const bool is_up = static_cast<Shuffle>(op.sub) == Shuffle::kUp;
    is_inside[lane] = (is_up ? from >= most : from <= most) ? kAllLanes : 0;
    if (is_inside[lane] == 0) from = own;
    if ((c.mask >> from & 1) == 0) fault(c, op, "shuffle from a lane that takes no part");
    result[lane] = value[from];
  });
  uint32_t* d = words_of(c, op.d);
  for_lanes(c.mask, [&](uint32_t lane) { d[lane] = result[lane]; });
  if (op.d2 == kNone) return;
  uint32_t* d2 = words_of(c, op.d2);
  for_lanes(c.mask, [&](uint32_t lane) { d2[lane] = is_inside[lane]; });
}

void vote(Context& c, const Op& op) {
  const uint32_t set = (mask_of(words_of(c, op.s[0])) ^ (op.is_signed ? kAllLanes : 0)) & c.mask;
  const bool result = static_cast<Vote>(op.sub) == Vote::kAll ? set == c.mask : set != 0;
  uint32_t* d = words_of(c, op.d);
  for_lanes(c.mask, [&](uint32_t lane) { d[lane] = result ? kAllLanes : 0; });
}

void redux(Context& c, const Op& op) {
  const uint32_t* value = words_of(c, op.s[0]);
  const auto kind = static_cast<Redux>(op.sub);
  uint32_t result = kind == Redux::kMin ? ~0u : 0u;
  for_lanes(c.mask, [&](uint32_t lane) {
    switch (kind) {
      case Redux::kAdd: result += value[lane]; break;
      case Redux::kMin: result = std::min(result, value[lane]); break;
      case Redux::kMax: result = std::max(result, value[lane]); break;
      case Redux::kOr: result |= value[lane]; break;
    }
  });
  uint32_t* d = words_of(c, op.d);
  for_lanes(c.mask, [&](uint32_t lane) { d[lane] = result; });
}

void warp_barrier(Context& c, const Op& /*op*/) { ++c.warp.sync_epoch; }

void join_registers(Context& c, const Op& op) {
  const uint64_t part = (uint64_t{1} << op.element_bits) - 1;
  uint32_t* d = words_of(c, op.d);
  for_lanes(c.mask, [&](uint32_t lane) {
    uint64_t value = 0;
    for (uint32_t k = 0; k < op.count; ++k) {
      value |= (words_of(c, op.v[k])[lane] & part) << (k * op.element_bits);
    }
    if (op.width[0] == 64) {
      put<uint64_t>(d, lane, value);
    } else {
      d[lane] = static_cast<uint32_t>(value);
    }
  });
}

void split_register(Context& c, const Op& op) {
  const uint64_t part = (uint64_t{1} << op.element_bits) - 1;
  const uint32_t* s = words_of(c, op.s[0]);
  for_lanes(c.mask, [&](uint32_t lane) {
    const uint64_t value = op.width[0] == 64 ? get<uint64_t>(s, lane) : s[lane];
    for (uint32_t k = 0; k < op.count; ++k) {
      if (op.v[k] == kNone) continue;
      words_of(c, op.v[k])[lane] = static_cast<uint32_t>(value >> (k * op.element_bits) & part);
    }
  });
}

}  // namespace ptx
