# Installs gradferry into a scratch prefix, builds examples/cpp against it as a user does, and
# trains two ranks with it.
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
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/prefix --component development)
run(${CMAKE_COMMAND} -S ${SOURCE_DIR} -B ${WORK_DIR}/build -G ${GENERATOR}
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix)
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${TRAIN_TWO_RANKS} ${WORK_DIR}/build/train ${WORK_DIR}/trained)
