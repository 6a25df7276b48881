#include <torch/csrc/Exceptions.h>

#include <array>

#include "bindings.h"
#include "protocol/faults.h"

namespace gradferry {
namespace {

// In the order of ErrorKind. References are kept for the life of the process.
constexpr std::array kClassNames = {"ConfigError", "RankMismatchError", "ProtocolError",
                                    "PeerError",   "StateError",        "DivergedError"};
std::array<PyObject*, kClassNames.size()> classes{};
PyObject* echo_class = nullptr;

PyObject* class_of(ErrorKind kind) { return classes.at(static_cast<size_t>(kind)); }

// torch's autograd translates subclasses of PyTorchError, and no other exception of ours.
struct TorchException final : torch::PyTorchError {
  explicit TorchException(const Error& error) : PyTorchError(error.what()), kind(error.kind()) {}
  PyObject* python_type() override { return class_of(kind); }
  ErrorKind kind;
};

}  // namespace

std::exception_ptr make_torch_exception(const Error& error) {
  return std::make_exception_ptr(TorchException(error));
}

bool is_echo(const py::error_already_set& error) { return error.matches(echo_class); }

void bind_errors(py::module_& /*module*/) {
  const py::module_ errors = py::module_::import("gradferry.errors");
  for (size_t i = 0; i < kClassNames.size(); ++i) {
    classes[i] = py::object(errors.attr(kClassNames[i])).release().ptr();
  }
  echo_class = py::object(errors.attr("EchoError")).release().ptr();
  py::register_exception_translator([](std::exception_ptr exception) {
    try {
      if (exception) std::rethrow_exception(exception);
    } catch (const EchoError& error) {
      PyErr_SetString(echo_class, error.what());
    } catch (const Error& error) {
      PyErr_SetString(class_of(error.kind()), error.what());
    } catch (TorchException& error) {
      PyErr_SetString(error.python_type(), error.what());
    }
  });
}

}  // namespace gradferry
