// Parses codec strings with any table of codecs; parse_codec() of codec.h uses that of codecs().
#pragma once

#include <span>
#include <string_view>

#include "gradferry/codec.h"

namespace gradferry {

ParsedCodec parse_codec_in(std::string_view text, std::span<const Codec> table);

}  // namespace gradferry
