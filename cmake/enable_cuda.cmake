# Enables CUDA. Unless CMAKE_CUDA_ARCHITECTURES or CUDAARCHS says otherwise, code is for the GPUs of
# data centres since 2020, whether this machine has one or not: machine code for sm_80, sm_90 and
# sm_100, which all GPUs of the same major version run, and PTX of the newest, which drivers
# translate for those that follow. An older nvcc makes what it knows of these.
include(CheckLanguage)
check_language(CUDA)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES $ENV{CUDAARCHS})  # CMake itself looks at it only the first time
elseif(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code
    OUTPUT_VARIABLE known_gpus ERROR_QUIET)
  set(newest_gpu 80)
  foreach(gpu IN ITEMS 90 100)
    if(known_gpus MATCHES "sm_${gpu}[\r\n]")
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest_gpu}-real)
      set(newest_gpu ${gpu})
    endif()
  endforeach()
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest_gpu})
endif()
enable_language(CUDA)
# CMake learns the default dialect of nvcc from its output, and of some versions nothing else.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()

# Lists for which GPUs this build is in cuda_architectures, and stops at those without the
# instructions that kernels use (reductions over a warp came with 8.0), where nvcc would name them.
set(cuda_architectures ${CMAKE_CUDA_ARCHITECTURES})
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
  set(cuda_architectures ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
elseif(CMAKE_CUDA_ARCHITECTURES STREQUAL "all" OR CMAKE_CUDA_ARCHITECTURES STREQUAL "all-major")
  string(TOUPPER "${CMAKE_CUDA_ARCHITECTURES}" every)
  string(REPLACE "-" "_" every "CMAKE_CUDA_ARCHITECTURES_${every}")
  set(cuda_architectures ${${every}})
endif()
foreach(gpu IN LISTS cuda_architectures)
  string(REGEX MATCH "^[0-9]+" number "${gpu}")
  if(number AND number LESS 80)
    message(FATAL_ERROR
      " CUDAARCHS or CMAKE_CUDA_ARCHITECTURES is \"${CMAKE_CUDA_ARCHITECTURES}\", and sm_${number} is"
      " none of the GPUs that gradferry's kernels run on: compute capability 8.0 or newer. Name newer"
      " ones, such as 80-real;90, or none for all; or build for CPUs only: -DGRADFERRY_CUDA=OFF")
  endif()
endforeach()
