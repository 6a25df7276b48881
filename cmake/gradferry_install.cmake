# Makes find_package(gradferry) work: headers, library, exported targets, config and version files.
include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gradferry)

install(TARGETS gradferry_include gradferry_kernels EXPORT gradferryTargets COMPONENT development)
if(GRADFERRY_WITH_CUDA)
  install(TARGETS gradferry_kernels_cuda EXPORT gradferryTargets COMPONENT development)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/gradferry DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        COMPONENT development FILES_MATCHING PATTERN "*.h")
install(EXPORT gradferryTargets NAMESPACE gradferry:: DESTINATION ${config_dir}
        COMPONENT development)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/gradferryConfig.cmake.in
  ${PROJECT_BINARY_DIR}/gradferryConfig.cmake INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/gradferryConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/gradferryConfig.cmake
              ${PROJECT_BINARY_DIR}/gradferryConfigVersion.cmake
        DESTINATION ${config_dir} COMPONENT development)
