# Defines the target torch::torch, of the folder GRADFERRY_LIBTORCH, which has include/ and lib/, or
# of the Python in use. Not through find_package(Torch): the CMake files of torch with CUDA demand a
# CUDA toolkit even for a CPU build. Installed too: a program finds torch as its gradferry did.
if(GRADFERRY_LIBTORCH AND NOT GRADFERRY_PYTHON)
  set(torch_dir ${GRADFERRY_LIBTORCH})
  # The second one where the first only includes it.
  foreach(header torch/csrc/api/include/torch/version.h torch/headeronly/version.h)
    if(EXISTS ${torch_dir}/include/${header})
      file(STRINGS ${torch_dir}/include/${header} lines REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
      list(APPEND torch_version_lines ${lines})
    endif()
  endforeach()
  if(NOT torch_version_lines OR NOT EXISTS ${torch_dir}/lib/libtorch_cpu.so)
    message(FATAL_ERROR "GRADFERRY_LIBTORCH=${torch_dir} is no libtorch: it lacks torch's headers in "
      "include/, or lib/libtorch_cpu.so; set it to the folder libtorch of the archive, or to the "
      "folder torch of a Python package")
  endif()
  string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" GRADFERRY_TORCH_VERSION
    "${torch_version_lines}")
  message(STATUS "torch ${GRADFERRY_TORCH_VERSION} of ${torch_dir}")
else()
  find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "
import os, torch
print(torch.__version__)
print(os.path.dirname(torch.__file__))"
    OUTPUT_VARIABLE torch_facts ERROR_VARIABLE torch_error RESULT_VARIABLE torch_result
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(torch_result)
    # A line that starts with a blank is not wrapped, so that the command can be copied and searched.
    message(STATUS "import torch: ${torch_error}")
    message(FATAL_ERROR
      " gradferry is built against the torch it will run with, and the Python that builds it has none:"
      " install torch and scikit-build-core, then run: pip install --no-build-isolation .")
  endif()
  string(REPLACE "\n" ";" torch_facts "${torch_facts}")
  list(GET torch_facts 0 GRADFERRY_TORCH_VERSION)
  list(GET torch_facts 1 torch_dir)
  message(STATUS "torch ${GRADFERRY_TORCH_VERSION} of ${Python_EXECUTABLE}")
endif()

add_library(torch::torch INTERFACE IMPORTED)
target_include_directories(torch::torch SYSTEM INTERFACE
  ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
target_link_directories(torch::torch INTERFACE ${torch_dir}/lib)
foreach(library c10 torch_cpu torch)
  target_link_libraries(torch::torch INTERFACE ${torch_dir}/lib/lib${library}.so)
endforeach()
target_compile_definitions(torch::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
