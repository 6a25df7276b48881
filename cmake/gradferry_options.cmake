# Options of the build, and what every target of ours shares.
option(GRADFERRY_PYTHON "Build hooks/ and the Python package's native module (needs torch)" OFF)
option(GRADFERRY_TESTS "Build the C++ tests (needs GoogleTest)" OFF)
option(GRADFERRY_GPU_CHECK "Build the program that runs the tests of kernels on a GPU (needs nvcc)" OFF)
option(GRADFERRY_FUZZ "Build the fuzz targets as programs of libFuzzer (needs clang)" OFF)
option(GRADFERRY_BENCHMARKS "Build the C++ benchmarks (needs Google Benchmark)" OFF)
option(GRADFERRY_WERROR "Treat warnings in our own code as errors" OFF)
set(GRADFERRY_CUDA "AUTO" CACHE STRING
  "CUDA kernels: AUTO (when nvcc is found and works), ON (or fail), OFF")
set_property(CACHE GRADFERRY_CUDA PROPERTY STRINGS AUTO ON OFF)
set(GRADFERRY_PREBUILT_KERNELS "" CACHE PATH
  "Install prefix of gradferry's kernels, to use instead of building them")
set(GRADFERRY_LIBTORCH "" CACHE PATH
  "A libtorch, or the folder torch of a Python package, to build hooks/ against without Python")
set(GRADFERRY_SANITIZE "" CACHE STRING "Sanitizers for every target, e.g. address,undefined")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

# A compiler cache does not keep what was compiled with precompiled headers, and does more than they.
if(CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_DISABLE_PRECOMPILE_HEADERS ON)
endif()

# Warnings and numerics: contraction is off everywhere, so that no fused multiply-add changes a bit.
function(gradferry_target_defaults target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion
                                           -ffp-contract=off)
  if(GRADFERRY_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(GRADFERRY_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${GRADFERRY_SANITIZE}
      -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PUBLIC -fsanitize=${GRADFERRY_SANITIZE})
  endif()
endfunction()
