# Enables CUDA: for the GPUs of this machine; where it has none, PTX alone, which is quick to build
# and which drivers translate for any of them. The preset `release` is for all of them.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
  execute_process(COMMAND nvidia-smi -L OUTPUT_VARIABLE gpus ERROR_QUIET)
  if(gpus MATCHES "^GPU 0")
    set(CMAKE_CUDA_ARCHITECTURES native)
  else()
    set(CMAKE_CUDA_ARCHITECTURES 80-virtual)
  endif()
endif()
enable_language(CUDA)
# CMake learns the default dialect of nvcc from its output, and of some versions nothing else.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
