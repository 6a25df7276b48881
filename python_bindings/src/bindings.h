// What the bind_*.cpp files share.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "gradferry/error.h"

namespace gradferry {

// Makes gradferry::Error arrive in Python as the class of gradferry.errors that its kind names.
void bind_errors(py::module_& module);
void bind_codecs(py::module_& module);
void bind_tensor_messages(py::module_& module);
void bind_engine(py::module_& module);
void bind_ddp_hook(py::module_& module);
void bind_device_codec(py::module_& module);
void bind_device_node(py::module_& module);
void bind_roof_timing(py::module_& module);
void bind_compressed_mean(py::module_& module);

// For errors that travel through torch's autograd, which knows only torch's own exception base.
std::exception_ptr make_torch_exception(const Error& error);

}  // namespace gradferry
