# Makes find_package(gradferry COMPONENTS hooks) work, in a prefix that has the kernels, too: the
# headers of hooks/include, library and exported target, and what finds torch.
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/gradferry)
install(TARGETS gradferry_hooks EXPORT gradferryHooksTargets COMPONENT development)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/hooks/include/gradferry
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development FILES_MATCHING PATTERN "*.h")
install(EXPORT gradferryHooksTargets NAMESPACE gradferry:: DESTINATION ${config_dir}
        COMPONENT development)
configure_file(${CMAKE_CURRENT_LIST_DIR}/gradferryHooks.cmake.in
  ${PROJECT_BINARY_DIR}/gradferryHooks.cmake @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/gradferryHooks.cmake ${CMAKE_CURRENT_LIST_DIR}/find_torch.cmake
        DESTINATION ${config_dir} COMPONENT development)
