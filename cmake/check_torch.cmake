# Stops before a torch that gradferry does not support makes compilers say so, minutes later.
string(REGEX MATCH "^[0-9]+[.][0-9]+" torch_minor_version "${GRADFERRY_TORCH_VERSION}")
if(torch_minor_version VERSION_LESS GRADFERRY_OLDEST_TORCH
   OR torch_minor_version VERSION_GREATER GRADFERRY_NEWEST_TORCH)
  message(FATAL_ERROR
    " gradferry ${PROJECT_VERSION} supports torch ${GRADFERRY_OLDEST_TORCH} to"
    " ${GRADFERRY_NEWEST_TORCH}, and ${torch_dir} is torch ${GRADFERRY_TORCH_VERSION}:"
    " install one of those, or build a gradferry that supports torch ${torch_minor_version}")
endif()
