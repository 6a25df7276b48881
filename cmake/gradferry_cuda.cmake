# Resolves GRADFERRY_CUDA=AUTO|ON|OFF into GRADFERRY_WITH_CUDA and says what was decided.
set(GRADFERRY_WITH_CUDA OFF)
string(TOUPPER "${GRADFERRY_CUDA}" cuda_choice)
if(NOT cuda_choice MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "GRADFERRY_CUDA is \"${GRADFERRY_CUDA}\": it must be AUTO, ON or OFF")
endif()
if(cuda_choice STREQUAL "OFF")
  message(STATUS "CUDA: off (GRADFERRY_CUDA=OFF)")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(cuda_choice STREQUAL "ON")
    message(FATAL_ERROR
      "GRADFERRY_CUDA=ON, but no working nvcc was found. Install the CUDA toolkit, or name its "
      "compiler with -DCMAKE_CUDA_COMPILER=/path/to/nvcc, or build without: -DGRADFERRY_CUDA=OFF")
  endif()
  message(STATUS "CUDA: off (no working nvcc was found)")
  return()
endif()

include(${CMAKE_CURRENT_LIST_DIR}/enable_cuda.cmake)
find_package(CUDAToolkit REQUIRED)
set(GRADFERRY_WITH_CUDA ON)
list(JOIN cuda_architectures " " GRADFERRY_CUDA_ARCHITECTURES)
set(GRADFERRY_CUDA_COMPILER "nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
message(STATUS "CUDA: on (${GRADFERRY_CUDA_COMPILER}, architectures ${GRADFERRY_CUDA_ARCHITECTURES})")
