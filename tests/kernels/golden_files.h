// Files of tests/kernels/golden. GRADFERRY_WRITE_GOLDEN=1 writes them.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace gradferry::testing {

inline std::string golden_path(const std::string& name) {
  return std::string(GRADFERRY_GOLDEN_DIR) + "/" + name + ".bin";
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << "missing " << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void expect_golden(const std::string& name, const std::string& found) {
  if (std::getenv("GRADFERRY_WRITE_GOLDEN") != nullptr) {
    std::filesystem::create_directories(std::filesystem::path(golden_path(name)).parent_path());
    std::ofstream(golden_path(name), std::ios::binary) << found;
  }
  EXPECT_TRUE(read_file(golden_path(name)) == found) << name << " differs";
}

template <class Bytes>
std::string as_string(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace gradferry::testing
