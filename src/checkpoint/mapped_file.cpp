#include "checkpoint/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/check.hpp"

namespace shunt {

namespace {

// O_NONBLOCK: a pipe that nobody writes to is refused, not waited for.
int open_file(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}

class Descriptor {
 public:
  explicit Descriptor(const std::string& path) : fd_(open_file(path)) {
    if (fd_ < 0) fail(Status::io, "{}: {}", path, std::strerror(errno));
  }
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

std::size_t regular_size(const std::string& path, int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail(Status::io, "{}: {}", path, std::strerror(errno));
  if (!S_ISREG(status.st_mode)) {
    fail(Status::io, "{}: is {}, must be a regular file", path,
         S_ISDIR(status.st_mode) ? "a directory" : "a device or pipe");
  }
  return static_cast<std::size_t>(status.st_size);
}

}  // namespace

void check_path(const std::string& path) {
  if (path.empty()) fail(Status::invalid_argument, "path is '': must name a file");
}

MappedFile::MappedFile(const std::string& path) {
  check_path(path);
  const Descriptor file(path);
  size_ = regular_size(path, file.get());
  if (size_ == 0) return;  // mmap refuses 0 bytes
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (mapped == MAP_FAILED) {
    fail(Status::io, "{}: cannot map {} bytes: {}", path, size_, std::strerror(errno));
  }
  data_ = static_cast<const unsigned char*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<unsigned char*>(data_), size_);
}

bool file_exists(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

std::string read_text(const std::string& path, std::size_t limit) {
  const Descriptor file(path);
  const std::size_t size = regular_size(path, file.get());
  if (size > limit) {
    fail(Status::bad_file, "{}: {} bytes, must be at most {}", path, size, limit);
  }
  std::string text(size, '\0');
  std::size_t done = 0;
  while (done < size) {
    const ssize_t got = ::read(file.get(), text.data() + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(Status::io, "{}: {}", path, std::strerror(errno));
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  text.resize(done);
  return text;
}

}  // namespace shunt
