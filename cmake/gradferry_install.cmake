# Makes find_package(gradferry) work: the exported targets, the config file and its version file.
# include/ and kernels/ add their targets to the export set gradferryTargets.
include(CMakePackageConfigHelpers)
set(GRADFERRY_CONFIG_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/gradferry)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/gradferryConfig.cmake.in
  ${PROJECT_BINARY_DIR}/gradferryConfig.cmake INSTALL_DESTINATION ${GRADFERRY_CONFIG_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gradferryConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gradferryConfig.cmake
              ${PROJECT_BINARY_DIR}/gradferryConfigVersion.cmake
        DESTINATION ${GRADFERRY_CONFIG_DIR} COMPONENT development)
