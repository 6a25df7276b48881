# Resolves GRADFERRY_CUDA=AUTO|ON|OFF into GRADFERRY_WITH_CUDA and says what was decided. CUDA is
# enabled only when kernels/ holds CUDA sources.
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

file(GLOB cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/kernels/*/*.cu)
if(NOT cuda_sources)
  message(STATUS "CUDA: off (${CMAKE_CUDA_COMPILER} works, but kernels/ has no CUDA sources yet)")
  return()
endif()
enable_language(CUDA)
set(GRADFERRY_WITH_CUDA ON)
message(STATUS "CUDA: on (${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION})")
