// Archives of tests/kernels/golden. With GRADFERRY_WRITE_GOLDEN=FOLDER what is found is written to
// FOLDER/<archive>/<name>.bin.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "tests/kernels/archive.h"

namespace gradferry::testing {

inline const std::map<std::string, std::string>& golden_archive(const std::string& name) {
  static std::map<std::string, std::map<std::string, std::string>> archives;
  auto found = archives.find(name);
  if (found == archives.end()) {
    found = archives.emplace(name, read_archive(GRADFERRY_GOLDEN_DIR "/" + name + ".tar")).first;
  }
  return found->second;
}

inline void expect_golden(const std::string& archive, const std::string& name,
                          const std::string& found) {
  if (const char* folder = std::getenv("GRADFERRY_WRITE_GOLDEN")) {
    const std::filesystem::path path = std::filesystem::path(folder) / archive;
    std::filesystem::create_directories(path);
    std::ofstream(path / (name + ".bin"), std::ios::binary) << found;
    return;
  }
  EXPECT_TRUE(golden_archive(archive).at(name + ".bin") == found)
      << name << " of " << archive << " differs";
}

template <class Bytes>
std::string as_string(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace gradferry::testing
