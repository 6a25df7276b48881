// Conversion of torch's dtypes to those of the codecs.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "gradferry/codec.h"
#include "gradferry/error.h"

namespace gradferry {

// Throws Error(kConfig) for a dtype that no codec takes.
inline ScalarType to_scalar_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Float: return ScalarType::kFloat32;
    case at::ScalarType::BFloat16: return ScalarType::kBFloat16;
    case at::ScalarType::Half: return ScalarType::kFloat16;
    case at::ScalarType::Double: return ScalarType::kFloat64;
    default:
      throw Error(ErrorKind::kConfig,
                  std::string("dtype ") + c10::toString(dtype) +
                      " is not supported; use float32, bfloat16, float16 or float64");
  }
}

}  // namespace gradferry
