# Writes into `folder` the names of all codecs that have a CUDA source, codec_names.h, and their
# classes, codec_headers.h, for kernels/chunk_kernels.cu.
function(gradferry_write_codec_headers folder)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/kernels/*/*_cuda.cu)
  set(includes "")
  set(rows "")
  foreach(source IN LISTS sources)
    get_filename_component(name ${source} NAME)
    string(REPLACE "_cuda.cu" "" codec ${name})
    string(APPEND includes "#include \"kernels/${codec}/${codec}_cuda.h\"\n")
    string(APPEND rows " row(${codec})")
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/codec_headers.h CONTENT "@includes@" @ONLY)
  file(CONFIGURE OUTPUT ${folder}/codec_names.h
    CONTENT "#define GRADFERRY_FOR_EACH_CUDA_CODEC(row)@rows@\n" @ONLY)
endfunction()
