# Builds and installs gradferry for C++ programs as docs/guide/reducer.md says, but with kernels that are
# there; builds examples/cpp against it as a user does, and trains two ranks with it.
cmake_minimum_required(VERSION 3.25)
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(result)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
if(PREBUILT_KERNELS)
  file(COPY ${PREBUILT_KERNELS}/ DESTINATION ${WORK_DIR}/prefix)
endif()
run(${CMAKE_COMMAND} -S ${REPOSITORY} -B ${WORK_DIR}/gradferry -G ${GENERATOR}
    -DCMAKE_CXX_COMPILER=${CXX} -DGRADFERRY_LIBTORCH=${LIBTORCH}
    -DGRADFERRY_PREBUILT_KERNELS=${PREBUILT_KERNELS})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/gradferry)
run(${CMAKE_COMMAND} --install ${WORK_DIR}/gradferry --prefix ${WORK_DIR}/prefix)
run(${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR}/build -G ${GENERATOR}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
# What a program compiles with is its own, and its cache outlives this gradferry.
file(STRINGS ${WORK_DIR}/build/compile_commands.json maps REGEX "-f[a-z]+-prefix-map")
file(STRINGS ${WORK_DIR}/build/CMakeCache.txt kept REGEX "^GRADFERRY_LIBTORCH")
# Our own library names no folder of the machine that built it.
file(GLOB_RECURSE library ${WORK_DIR}/prefix/libgradferry_hooks.a)
file(STRINGS ${library} folders REGEX "${REPOSITORY}/(hooks|include)/.*[.](h|cpp)")
if(NOT library OR maps OR kept OR folders)
  message(FATAL_ERROR "library: '${library}'; a program got the options '${maps}' and keeps '${kept}'; "
    "folders in the library: '${folders}'")
endif()
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${TRAIN_TWO_RANKS} ${WORK_DIR}/build/train ${WORK_DIR}/trained)
