// Ranks meet, and connect their lanes. The GIL is released while they wait.
#include <pybind11/stl.h>

#include <functional>

#include "bindings.h"
#include "holders.h"
#include "host/connect_ranks.h"
#include "host/sockets.h"
#include "protocol/faults.h"
#include "rendezvous.h"
#include "threads.h"

namespace gradferry {
namespace {

// Calls `poll`, and handlers of signals: so Ctrl-C ends the wait.
std::function<void()> calling(const py::function& poll) {
  return [&poll] {
    const py::gil_scoped_acquire acquired;
    try {
      poll();
    } catch (const py::error_already_set& error) {
      if (!is_echo(error)) throw;
      throw EchoError(py::str(error.value()));
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  };
}

void meet(const py::handle& store, uint32_t rank, const WorldRanks& world_ranks,
          double longest_seconds, const std::string& purpose, const py::function& between_polls) {
  Rendezvous rendezvous(to_store(store), rank, static_cast<uint32_t>(world_ranks.size()),
                        to_milliseconds(longest_seconds), world_ranks);
  const py::gil_scoped_release released;
  rendezvous.meet(
      {.purpose = purpose, .brought = nullptr, .between_polls = calling(between_polls)});
}

py::list connect_lanes(const py::handle& store, uint32_t rank, const WorldRanks& world_ranks,
                       std::vector<std::vector<uint32_t>> lanes, double longest_seconds,
                       const py::function& between_polls, double timeout_seconds) {
  const auto held = to_store(store);
  std::vector<std::shared_ptr<Lane>> connected;
  {
    const py::gil_scoped_release released;
    connected = make_socket_lanes(
        rank,
        connect_ranks(*held, {.rank = rank,
                              .world_size = static_cast<uint32_t>(world_ranks.size()),
                              .world_ranks = world_ranks,
                              .lanes = std::move(lanes),
                              .deadline = now() + to_milliseconds(longest_seconds),
                              .between_polls = calling(between_polls)}),
        to_milliseconds(timeout_seconds), world_ranks);
  }
  py::list made;
  for (const auto& lane : connected) made.append(to_python(lane));
  return made;
}

}  // namespace

void bind_rendezvous(py::module_& module) {
  module.def("plain_reason", &plain_reason, py::arg("text"));
  module.def(
      "is_echo", [](const std::string& text) { return reason_of(text) != Reason::kOther; },
      py::arg("text"));
  module.def("name_ranks", &name_ranks, py::arg("ranks"));
  module.def("meet", &meet, py::arg("store"), py::kw_only(), py::arg("rank"),
             py::arg("world_ranks"), py::arg("longest_seconds"), py::arg("purpose"),
             py::arg("between_polls"));
  module.def("connect_lanes", &connect_lanes, py::arg("store"), py::kw_only(), py::arg("rank"),
             py::arg("world_ranks"), py::arg("lanes"), py::arg("longest_seconds"),
             py::arg("between_polls"), py::arg("timeout_seconds"));
}

}  // namespace gradferry
