# Looks into the object files of the vector kernels, without running them:
#   1. every weak symbol lies in the namespace of its instruction set. The linker keeps one copy of a
#      weak symbol, and a scalar kernel must not get one compiled for a newer processor.
#      (DW.ref.* is a pointer, not code.)
#   2. there is no fused multiply-add, which would change the bits of a result
include(${OBJECT_LIST})  # sets OBJECTS
if(NOT OBJECTS)
  message(FATAL_ERROR "no object files to check")
endif()
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} -C ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak_symbols "${symbols}")
  foreach(symbol IN LISTS weak_symbols)
    if(NOT symbol MATCHES "gradferry::(avx2|avx512)::|DW\\.ref\\.")
      message(SEND_ERROR "${object}: weak symbol outside of the kernel's namespace: ${symbol}")
    endif()
  endforeach()
  execute_process(COMMAND ${OBJDUMP} -d ${object} OUTPUT_VARIABLE code COMMAND_ERROR_IS_FATAL ANY)
  if(code MATCHES "vfn?m(add|sub)[0-9]*[ps][sd]")
    message(SEND_ERROR "${object}: contains a fused multiply-add")
  endif()
endforeach()
