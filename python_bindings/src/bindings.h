// What the bind_*.cpp files share.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <exception>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "gradferry/error.h"

namespace gradferry {

// Makes gradferry::Error arrive in Python as the class of gradferry.errors that its kind names.
void bind_errors(py::module_& module);
void bind_codecs(py::module_& module);
void bind_tensor_messages(py::module_& module);
void bind_engine(py::module_& module);
void bind_rendezvous(py::module_& module);  // after bind_engine()
void bind_ddp_hook(py::module_& module);
void bind_device_codec(py::module_& module);
void bind_compressed_mean(py::module_& module);

// Whether it is an EchoError.
bool is_echo(const py::error_already_set& error);

// By reference: torch registers some classes under another holder type.
inline c10::intrusive_ptr<c10d::Store> to_store(const py::handle& store) {
  return c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store.cast<c10d::Store&>());
}

inline std::chrono::milliseconds to_milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// For errors that travel through torch's autograd, which knows only torch's own exception base.
std::exception_ptr make_torch_exception(const Error& error);

}  // namespace gradferry
