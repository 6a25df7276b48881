# The CUDA kernels: a library of their own, which the CPU build never needs, and their PTX, for the
# lint in tests/kernels/cuda. Registers that spill and local memory are errors, so that a build
# without a GPU proves that there are none.
file(GLOB cuda_kernel_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/kernels/*/*_cuda.cu)
list(APPEND cuda_kernel_files ${PROJECT_SOURCE_DIR}/kernels/chunk_kernels.cu
  ${PROJECT_SOURCE_DIR}/kernels/common/message_kernels.cu
  ${PROJECT_SOURCE_DIR}/kernels/common/node_kernels.cu)
include(gradferry_codec_headers)
gradferry_write_codec_headers(${CMAKE_CURRENT_BINARY_DIR}/generated)

function(gradferry_cuda_target target)
  target_link_libraries(${target} PUBLIC gradferry::include)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}
    ${CMAKE_CURRENT_BINARY_DIR}/generated)
  target_compile_definitions(${target} PRIVATE GRADFERRY_KERNEL_NAMESPACE=cuda)
  # No contraction: every target must produce the same bits. (Division and roots are IEEE and
  # subnormal numbers kept unless nvcc is told otherwise.)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>)
  if(GRADFERRY_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
  endif()
endfunction()

add_library(gradferry_kernels_cuda STATIC cuda_library.cpp ${cuda_kernel_files})
add_library(gradferry::kernels_cuda ALIAS gradferry_kernels_cuda)
gradferry_cuda_target(gradferry_kernels_cuda)
# The runtime comes with the library, out of sight of others that a process may hold: what links
# this one loads and runs on machines without a GPU, a driver or a toolkit.
set_target_properties(gradferry_kernels_cuda PROPERTIES EXPORT_NAME kernels_cuda
  CUDA_RUNTIME_LIBRARY None)
target_link_libraries(gradferry_kernels_cuda PUBLIC gradferry_kernels CUDA::cudart_static)
target_link_options(gradferry_kernels_cuda INTERFACE LINKER:--exclude-libs,libcudart_static.a)
if(GRADFERRY_WERROR)
  target_compile_options(gradferry_kernels_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
    -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error>)
endif()

# Files with the PTX of all kernels, in GRADFERRY_PTX_FILES. Objects that hold nothing else have it as
# text where nvcc does not compress it. Builds for real GPUs look at that of sm_100, for which nvcc
# has another front end.
if(GRADFERRY_TESTS AND "${CMAKE_CUDA_ARCHITECTURES}" STREQUAL "90-virtual")
  target_compile_options(gradferry_kernels_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--no-compress>)
  set(ptx_files $<TARGET_OBJECTS:gradferry_kernels_cuda>)
elseif(GRADFERRY_TESTS)
  add_library(gradferry_kernels_ptx OBJECT ${cuda_kernel_files})
  gradferry_cuda_target(gradferry_kernels_ptx)
  set_target_properties(gradferry_kernels_ptx PROPERTIES CUDA_PTX_COMPILATION ON
    CUDA_ARCHITECTURES 100-virtual)
  set(ptx_files $<TARGET_OBJECTS:gradferry_kernels_ptx>)
endif()
set_property(GLOBAL PROPERTY GRADFERRY_PTX_FILES ${ptx_files})
