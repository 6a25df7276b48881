#include "gradferry/device_library.h"

#include <gtest/gtest.h>

#include "gradferry/error.h"

namespace gradferry {
namespace {

TEST(DeviceLibrary, IsAskedForInVain) {
  EXPECT_TRUE(codecs(Device::kCuda).empty());
  try {
    message_kernels();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kState);
    EXPECT_NE(std::string(error.what()).find("no device library is in use"), std::string::npos);
  }
}

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
  EXPECT_TRUE(codecs(Device::kCuda).empty());
}

}  // namespace
}  // namespace gradferry
