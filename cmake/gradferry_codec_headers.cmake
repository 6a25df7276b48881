# Writes codec_headers.h into `folder`, for kernels/cuda/chunk_kernels.cu: it includes the CUDA header of
# every codec.
function(gradferry_write_codec_headers folder)
  file(GLOB headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}
    ${PROJECT_SOURCE_DIR}/kernels/*/*_cuda.h)
  list(TRANSFORM headers REPLACE "(.+)" "#include \"\\1\"\n")
  list(JOIN headers "" includes)
  file(CONFIGURE OUTPUT ${folder}/codec_headers.h CONTENT "@includes@" @ONLY)
endfunction()
