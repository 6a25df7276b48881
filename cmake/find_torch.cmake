# Finds torch by asking the Python in use, not through find_package(Torch): the CUDA wheel's CMake
# files demand a CUDA toolkit even for a CPU build. Defines the target torch::torch.
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "
import torch
from torch.utils.cpp_extension import include_paths, library_paths
print(torch.__version__)
print(';'.join(include_paths()))
print(';'.join(library_paths()))
print(int(torch.compiled_with_cxx11_abi()))"
  OUTPUT_VARIABLE torch_facts ERROR_VARIABLE torch_error RESULT_VARIABLE torch_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(torch_result)
  # A line that starts with a blank is not wrapped, so that the command can be copied and searched.
  message(STATUS "import torch: ${torch_error}")
  message(FATAL_ERROR
    " gradferry is built against the torch it will run with, and the Python that builds it has none:"
    " install torch and scikit-build-core, then run: pip install --no-build-isolation .")
endif()
string(REPLACE ";" "\\;" torch_facts "${torch_facts}")
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 GRADFERRY_TORCH_VERSION)
list(GET torch_facts 1 torch_include_dirs)
list(GET torch_facts 2 torch_library_dirs)
list(GET torch_facts 3 torch_cxx11_abi)
message(STATUS "torch ${GRADFERRY_TORCH_VERSION} of ${Python_EXECUTABLE}")
string(REGEX MATCH "^[0-9]+[.][0-9]+" torch_minor_version "${GRADFERRY_TORCH_VERSION}")
if(torch_minor_version VERSION_LESS GRADFERRY_OLDEST_TORCH
   OR torch_minor_version VERSION_GREATER GRADFERRY_NEWEST_TORCH)
  message(FATAL_ERROR
    " gradferry ${PROJECT_VERSION} supports torch ${GRADFERRY_OLDEST_TORCH} to"
    " ${GRADFERRY_NEWEST_TORCH}, and this Python has torch ${GRADFERRY_TORCH_VERSION}:"
    " install one of those, or build a gradferry that supports torch ${torch_minor_version}")
endif()

add_library(torch::torch INTERFACE IMPORTED)
target_include_directories(torch::torch SYSTEM INTERFACE ${torch_include_dirs})
target_link_directories(torch::torch INTERFACE ${torch_library_dirs})
target_link_libraries(torch::torch INTERFACE c10 torch_cpu torch)
# Checks in torch's headers and ours hold __FILE__: without the folders of the machine that builds.
list(GET torch_include_dirs 0 torch_headers)
target_compile_options(torch::torch INTERFACE -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=
                                              -fmacro-prefix-map=${torch_headers}/=)
target_compile_definitions(torch::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
