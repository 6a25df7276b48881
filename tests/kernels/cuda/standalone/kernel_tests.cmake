# The tests of kernels without GoogleTest, for which gtest/gtest.h stands in: compiled once, for the
# emulator and for a GPU.
include_guard(GLOBAL)
set(simt ${PROJECT_SOURCE_DIR}/tests/kernels/simt)
add_library(gradferry_standalone_kernel_tests OBJECT ${simt}/kernels_test.cpp
  ${simt}/chunk_kernels_test.cpp ${simt}/message_kernels_test.cpp ${simt}/node_kernels_test.cpp)
gradferry_target_defaults(gradferry_standalone_kernel_tests)
target_include_directories(gradferry_standalone_kernel_tests BEFORE PRIVATE
  ${PROJECT_SOURCE_DIR}/tests/kernels/cuda/standalone ${PROJECT_SOURCE_DIR})
target_link_libraries(gradferry_standalone_kernel_tests PRIVATE gradferry::include)
