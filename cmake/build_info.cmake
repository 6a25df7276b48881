# Writes gradferry/_build_info.py: what this build was made from, compared at import with what runs.
file(STRINGS ${PROJECT_SOURCE_DIR}/include/gradferry/wire.h wire_version_line
  REGEX "kWireVersion = [0-9]+")
string(REGEX REPLACE ".*kWireVersion = ([0-9]+).*" "\\1" GRADFERRY_WIRE_VERSION
  "${wire_version_line}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/include/gradferry/wire.h)
# Under pip that of cmake/package_metadata.py.
set(GRADFERRY_PACKAGE_VERSION ${PROJECT_VERSION})
if(SKBUILD_PROJECT_VERSION_FULL)
  set(GRADFERRY_PACKAGE_VERSION ${SKBUILD_PROJECT_VERSION_FULL})
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/_build_info.py.in ${PROJECT_BINARY_DIR}/_build_info.py @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/_build_info.py DESTINATION gradferry COMPONENT python)
