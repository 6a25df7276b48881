// Archives of inputs and golden bytes, as tools/archive.sh writes them.
#pragma once

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>

namespace gradferry::testing {

// The files of an archive by name: blocks of 512 bytes, of which a file has one with its name and,
// at 124, its size as an octal number, then its content. An empty block ends the archive.
inline std::map<std::string, std::string> read_archive(const std::filesystem::path& path) {
  std::ifstream archive(path, std::ios::binary);
  std::map<std::string, std::string> files;
  std::array<char, 512> block{};
  while (archive.read(block.data(), block.size()) && block[0] != '\0') {
    std::string& content = files[block.data()];
    content.resize(std::strtoull(&block[124], nullptr, 8));
    archive.read(content.data(), static_cast<std::streamsize>(content.size()));
    archive.ignore(static_cast<std::streamsize>(-content.size() % 512));
  }
  if (!archive) throw std::runtime_error("missing or incomplete: " + path.string());
  return files;
}

}  // namespace gradferry::testing
