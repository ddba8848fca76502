#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/mapped_file.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"
#include "shunt/safetensors.hpp"

namespace shunt {

namespace {

// A file that appears under its name only when finish() returns: until then it has another name in
// the same folder, and is removed if anything throws. A device or pipe is written in place.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : path_(path), target_(path) {
    check_path(path);
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0) {
      if (S_ISDIR(status.st_mode)) fail(Status::io, "{}: is a directory", path);
      in_place_ = !S_ISREG(status.st_mode);
      if (!in_place_) {  // write through a link, do not replace it
        if (char* real = ::realpath(path.c_str(), nullptr)) {
          target_ = real;
          std::free(real);
        }
      }
    }
    if (in_place_) {
      fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
      if (fd_ < 0) refuse_io("cannot open it for writing");
      return;
    }
    static std::atomic<unsigned> counter{0};
    temporary_ = fmt::format("{}.{}.{}.tmp", target_, ::getpid(), counter++);
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0) refuse_io("cannot create it");
  }
  ~NewFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!temporary_.empty() && !finished_) ::unlink(temporary_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, std::size_t size) {
    const char* next = static_cast<const char*>(data);
    while (size > 0) {
      // Some systems cut a write at 2 GiB.
      const ssize_t done = ::write(fd_, next, std::min(size, std::size_t{1} << 30));
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) refuse_io("cannot write it");
      next += done;
      size -= static_cast<std::size_t>(done);
    }
  }
  void finish() {
    // A full disk may show only here.
    if (!in_place_ && ::fsync(fd_) != 0) refuse_io("cannot write it");
    const int closed = ::close(fd_);
    fd_ = -1;
    if (closed != 0) refuse_io("cannot write it");
    if (!in_place_ && ::rename(temporary_.c_str(), target_.c_str()) != 0) {
      refuse_io("cannot rename its temporary file");
    }
    finished_ = true;
  }

 private:
  [[noreturn]] void refuse_io(const char* what) const {
    fail(Status::io, "{}: {}: {}", path_, what, std::strerror(errno));
  }
  std::string path_, target_, temporary_;
  bool in_place_ = false;
  bool finished_ = false;
  int fd_ = -1;
};

bool is_utf8(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

}  // namespace

void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  // As the format's own writer: by alignment, then by name.
  std::vector<const std::pair<std::string, Tensor>*> order;
  std::set<std::string> names;
  for (const auto& pair : tensors) {
    const auto& [name, tensor] = pair;
    if (name == "__metadata__" || !names.insert(name).second) {
      fail(Status::invalid_argument, "write_safetensors: tensor name '{}' is {}", clean(name),
           name == "__metadata__" ? "reserved" : "given twice");
    }
    if (!is_utf8(name)) {
      fail(Status::invalid_argument, "write_safetensors: tensor name '{}' is not UTF-8",
           clean(name));
    }
    if (!tensor || tensor.device.type != DeviceType::cpu || !tensor.contiguous() ||
        (tensor.data == nullptr && tensor.elements() > 0)) {
      fail(Status::invalid_argument,
           "write_safetensors: tensor '{}' is {}: must be dense CPU memory", clean(name),
           tensor.describe());
    }
    if (tensor.elements() % 2 != 0 && bits(tensor.dtype) == 4) {
      fail(Status::invalid_argument,
           "write_safetensors: tensor '{}' is {}: must be a whole number of bytes", clean(name),
           tensor.describe());
    }
    order.push_back(&pair);
  }
  for (const auto& [key, value] : metadata) {
    if (is_utf8(key) && is_utf8(value)) continue;
    fail(Status::invalid_argument, "write_safetensors: metadata '{}' is not UTF-8", clean(key));
  }
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    const int wide_a = bits(a->second.dtype), wide_b = bits(b->second.dtype);
    return wide_a != wide_b ? wide_a > wide_b : a->first < b->first;
  });

  std::vector<WrittenTensor> written;
  for (const auto* pair : order) {
    const Tensor& tensor = pair->second;
    written.push_back({.name = pair->first,
                       .dtype = tensor.dtype,
                       .shape = {tensor.shape.data(), static_cast<std::size_t>(tensor.rank)},
                       .bytes = tensor.bytes()});
  }
  const std::string text = write_safetensors_header(written, metadata);
  if (text.size() > max_header_bytes) {
    fail(Status::invalid_argument, "write_safetensors: the header takes {} bytes: at most {}",
         text.size(), max_header_bytes);
  }

  NewFile file(path);
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  file.write(length, sizeof length);
  file.write(text.data(), text.size());
  for (const auto* pair : order) {
    file.write(pair->second.data, static_cast<std::size_t>(pair->second.bytes()));
  }
  file.finish();
}

}  // namespace shunt
