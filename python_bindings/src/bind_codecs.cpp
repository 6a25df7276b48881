#include <pybind11/stl.h>

#include "bindings.h"
#include "engine_options.h"
#include "gradferry/codec.h"
#include "gradferry/wire.h"
#include "scalar_type.h"

namespace gradferry {
namespace {

py::dict describe_option(const OptionSpec& option) {
  py::list choices;
  for (const std::string_view choice : option.choices) choices.append(std::string(choice));
  return py::dict(py::arg("name") = std::string(option.name),
                  py::arg("default") = std::string(option.default_value),
                  py::arg("help") = std::string(option.help), py::arg("minimum") = option.minimum,
                  py::arg("maximum") = option.maximum, py::arg("choices") = choices);
}

py::list describe_codecs() {
  py::list rows;
  for (const Codec& codec : codecs()) {
    py::list options;
    for (const OptionSpec& option : codec.options) options.append(describe_option(option));
    rows.append(py::dict(
        py::arg("name") = std::string(codec.name), py::arg("summary") = std::string(codec.summary),
        py::arg("lossy") = codec.lossy, py::arg("supports_float64") = codec.supports_float64,
        py::arg("options") = options));
  }
  return rows;
}

uint32_t payload_bytes(const std::string& codec, uint32_t num_elements, at::ScalarType dtype,
                       const std::string& stage) {
  GRADFERRY_EXPECTS(num_elements >= 1 && num_elements <= kTileElements, kConfig,
                    "a tile has 1 to " + std::to_string(kTileElements) + " elements, not " +
                        std::to_string(num_elements));
  GRADFERRY_EXPECTS(stage == "worker" || stage == "owner", kConfig,
                    "stage is 'worker' or 'owner', not '" + stage + "'");
  const ParsedCodec parsed = parse_codec(codec);
  return parsed.codec->payload_bytes(num_elements, to_scalar_type(dtype),
                                     stage == "worker" ? Stage::kWorker : Stage::kOwner,
                                     parsed.options);
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa isa : available_isas()) names.emplace_back(isa_name(isa));
  return names;
}

}  // namespace

void bind_codecs(py::module_& module) {
  module.attr("TILE_ELEMENTS") = kTileElements;
  module.attr("WIRE_VERSION") = kWireVersion;
  module.attr("HEADER_BYTES") = sizeof(MessageHeader);
  module.attr("COMMIT_BYTES") = sizeof(CommitRecord);
  module.def("codecs", &describe_codecs);
  module.def(
      "canonical_codec", [](const std::string& text) { return parse_codec(text).canonical; },
      py::arg("text"));
  module.def(
      "momentum_behind",
      [](const std::string& codec, double momentum) {
        const ParsedCodec parsed = parse_codec(codec);
        return momentum_behind({parsed.codec, parsed.options}, momentum);
      },
      py::arg("codec"), py::arg("momentum"));
  module.def("payload_bytes", &payload_bytes, py::arg("codec"), py::arg("num_elements"),
             py::arg("dtype"), py::arg("stage"));
  module.def("available_isas", &isa_names);
  module.def("active_isa", [] { return std::string(isa_name(active_isa())); });
}

}  // namespace gradferry
