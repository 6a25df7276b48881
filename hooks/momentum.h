// Momentum mode behind codecs that send a share of the elements.
//
// Of a gradient, 1 - m comes at once, and m stays for the steps to come: it is delayed by
// m / (1 - m) steps on average. Elements that are not sent wait as well, and are the later the
// smaller their share. Both delays together made trainings lag; so the more elements wait, the less
// stays of those that were sent. In sum all of a gradient comes, whatever m is: learning rates
// remain as they are. docs/decisions.md has the measurements behind the 1/4.
#pragma once

#include "layout.h"

namespace gradferry {

// The m of a codec in a training with `momentum` (0: none), in double precision:
// m / (1 - m) = momentum / (1 - momentum) / (1 + (1 / share - 1) / 4) for the codec's sent_share,
// so m = momentum where every element is sent.
inline double momentum_behind(const ResolvedCodec& codec, double momentum) {
  if (codec.codec->sent_share == nullptr) return momentum;
  const double unsent = 1.0 / codec.codec->sent_share(codec.options) - 1.0;
  const double delay = momentum / (1.0 - momentum) / (1.0 + unsent / 4.0);
  return delay / (1.0 + delay);
}

}  // namespace gradferry
