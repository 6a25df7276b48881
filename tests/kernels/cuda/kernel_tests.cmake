# The tests of kernels, which run on a GPU (standalone/) and on the CPU (tests/kernels/ptx).
set(kernel_tests ${PROJECT_SOURCE_DIR}/tests/kernels/cuda)
set(GRADFERRY_KERNEL_TESTS ${kernel_tests}/kernels_test.cpp ${kernel_tests}/chunk_kernels_test.cpp
  ${kernel_tests}/message_kernels_test.cpp ${kernel_tests}/node_kernels_test.cpp
  ${kernel_tests}/random_chunks_test.cpp ${kernel_tests}/device_kernels.cpp
  ${PROJECT_SOURCE_DIR}/tests/kernels/host_library.cpp)
