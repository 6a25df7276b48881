# Compiling the same sources once per instruction set, each into a namespace of that name. The choice
# between them is made at run time (kernels/isa.cpp).
set(GRADFERRY_ISAS scalar)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND GRADFERRY_ISAS avx2 avx512)
endif()
set(gradferry_flags_scalar "")
set(gradferry_flags_avx2 -mavx2 -mf16c)
set(gradferry_flags_avx512 -mavx2 -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq)
# GCC's own AVX-512 headers read "undefined" vectors, and GCC 12 warns where they are inlined.
list(APPEND gradferry_flags_avx512
  $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized> $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)

# gradferry_add_isa_objects(<target> <sources>...): adds the sources to the target, once per
# instruction set, as object libraries <target>_<isa>.
function(gradferry_add_isa_objects target)
  foreach(isa IN LISTS GRADFERRY_ISAS)
    add_library(${target}_${isa} OBJECT ${ARGN})
    gradferry_target_defaults(${target}_${isa})
    target_include_directories(${target}_${isa} PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${target}_${isa} PRIVATE gradferry::include)
    string(TOUPPER ${isa} macro)
    target_compile_definitions(${target}_${isa}
      PRIVATE GRADFERRY_KERNEL_NAMESPACE=${isa} GRADFERRY_KERNEL_${macro}=1)
    target_compile_options(${target}_${isa} PRIVATE ${gradferry_flags_${isa}})
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${isa}>)
  endforeach()
  if("avx2" IN_LIST GRADFERRY_ISAS)
    target_compile_definitions(${target} PRIVATE GRADFERRY_X86_KERNELS=1)
  endif()
endfunction()
