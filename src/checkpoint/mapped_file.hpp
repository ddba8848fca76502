// Files, read whole or mapped into memory.
#pragma once

#include <cstddef>
#include <string>

namespace shunt {

// Throws Error{invalid_argument} unless `path` says something.
void check_path(const std::string& path);

// A regular file mapped read only; unmapped by the destructor. Throws Error{io} with the operating
// system's reason, and as check_path() does.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const unsigned char* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  const unsigned char* data_ = nullptr;
  std::size_t size_ = 0;
};

bool file_exists(const std::string& path);
// The whole file. Throws Error{io}; Error{bad_file} when it is over `limit` bytes.
std::string read_text(const std::string& path, std::size_t limit);

}  // namespace shunt
