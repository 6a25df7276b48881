# The CUDA kernels: a library of their own, which the CPU build never needs, and their PTX, for the
# machine of tests/kernels/ptx. Registers that spill and local memory are errors in every preset, so
# that a build without a GPU proves that there are none.
file(GLOB cuda_kernel_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/kernels/*/*.cu)

function(gradferry_cuda_target target)
  target_link_libraries(${target} PUBLIC gradferry::include)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_definitions(${target} PRIVATE GRADFERRY_KERNEL_NAMESPACE=cuda)
  # No contraction: every target must produce the same bits. (Division and roots are IEEE and
  # subnormal numbers kept unless nvcc is told otherwise.)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-fmad=false --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra>)
  if(GRADFERRY_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings>)
  endif()
endfunction()

add_library(gradferry_kernels_cuda STATIC cuda/cuda_library.cpp ${cuda_kernel_files})
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

# Objects that hold all kernels as PTX and nothing else, for the lint and the machine of
# tests/kernels/ptx: nvcc leaves it uncompressed. Builds for real GPUs make them for sm_100, for
# which nvcc has another front end.
set(ptx_objects gradferry_kernels_cuda)
set(ptx_architecture ${CMAKE_CUDA_ARCHITECTURES})
if(GRADFERRY_TESTS)
  if(NOT "${ptx_architecture}" MATCHES "^[0-9]+-virtual$")
    set(ptx_objects gradferry_kernels_ptx)
    set(ptx_architecture 100-virtual)
    add_library(gradferry_kernels_ptx OBJECT cuda/cuda_library.cpp ${cuda_kernel_files})
    gradferry_cuda_target(gradferry_kernels_ptx)
    set_target_properties(gradferry_kernels_ptx PROPERTIES CUDA_ARCHITECTURES ${ptx_architecture})
  endif()
  target_compile_options(${ptx_objects} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--no-compress>)
endif()
set_property(GLOBAL PROPERTY GRADFERRY_PTX_OBJECTS $<TARGET_OBJECTS:${ptx_objects}>)
set_property(GLOBAL PROPERTY GRADFERRY_PTX_ARCHITECTURE ${ptx_architecture})
