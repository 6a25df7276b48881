// Momentum mode with codecs that send only a share of the elements.
//
// A step delivers the share 1 - m of a gradient and keeps m for later steps, which delays it by
// m / (1 - m) steps on average. Elements that are not sent wait as well, longer when the share is
// smaller. Both delays together slowed trainings down, so m is smaller for codecs that send fewer
// elements. Every gradient is delivered completely in the end, whatever m is, so learning rates
// need no change. docs/design/decisions.md has the measurements behind the 1/4.
#pragma once

#include "protocol/layout.h"

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
