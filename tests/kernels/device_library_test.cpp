#include "gradferry/device_library.h"

#include <gtest/gtest.h>

#include "gradferry/error.h"

namespace gradferry {
namespace {

void expect_no_library() {
  try {
    message_kernels();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kState);
    EXPECT_NE(std::string(error.what()).find("no device library is in use"), std::string::npos);
  }
}

TEST(DeviceLibrary, IsAskedForInVain) { expect_no_library(); }

TEST(DeviceLibrary, OfAnotherVersionIsRefusedWithBothVersions) {
  DeviceLibrary library{};
  library.version = kDeviceLibraryVersion + 41;
  try {
    use_device_library(library);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    const std::string text = error.what();
    EXPECT_NE(text.find("version " + std::to_string(library.version)), std::string::npos) << text;
    EXPECT_NE(text.find("version " + std::to_string(kDeviceLibraryVersion)), std::string::npos);
  }
  expect_no_library();
}

TEST(DeviceLibrary, RowsOfCodecsAreTheirPlacesInTheTable) {
  for (uint32_t i = 0; i < codecs().size(); ++i) EXPECT_EQ(row_of(codecs()[i]), i);
  EXPECT_EQ(row_of(*parse_codec("exact").codec), 0u);
}

}  // namespace
}  // namespace gradferry
