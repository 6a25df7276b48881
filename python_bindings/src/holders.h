// What Python objects hold of C++, kept whole where there is no memory to make one.
//
// pybind11 notes a new object in a table before it puts the holder into it. Without memory for the
// note it frees what the holder owns, and frees too; or, in a constructor, throws through Python.
// Either ends the process. Made by these functions, an object that was not noted owns nothing, and
// the caller gets a MemoryError.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

namespace gradferry {

// Holder: of the object's class.
template <typename Holder>
void hold(py::detail::value_and_holder& place, Holder held) {
  place.value_ptr() = held.get();
  try {
    place.type->init_instance(place.inst, &held);
  } catch (...) {
    place.value_ptr() = nullptr;
    throw;
  }
}

// Defines what .def(py::init(make), extra...) would.
template <typename Class, typename... Arguments, typename... Extra>
void def_init(Class& bound, typename Class::holder_type (*make)(Arguments...),
              const Extra&... extra) {
  bound.def(
      "__init__",
      [make](py::detail::value_and_holder& place, Arguments... arguments) {
        hold(place, make(std::forward<Arguments>(arguments)...));
      },
      py::detail::is_new_style_constructor(), extra...);
}

// A Python object for what none has yet.
template <typename T>
py::object to_python(const std::shared_ptr<T>& held) {
  const auto* type = py::detail::get_type_info(typeid(T), /*throw_if_missing=*/true);
  auto made = py::reinterpret_steal<py::object>(py::detail::make_new_instance(type->type));
  auto place = reinterpret_cast<py::detail::instance*>(made.ptr())->get_value_and_holder(type);
  hold(place, held);
  return made;
}

}  // namespace gradferry
