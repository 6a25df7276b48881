// gradferry._native: the table of contents.
#include "bindings.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "gradferry's C++ engine. Private: use the gradferry package.";
  gradferry::bind_errors(module);
  gradferry::bind_codecs(module);
  gradferry::bind_tensor_messages(module);
  gradferry::bind_engine(module);
  gradferry::bind_rendezvous(module);
  gradferry::bind_ddp_hook(module);
  gradferry::bind_device_codec(module);
  gradferry::bind_compressed_mean(module);
}
