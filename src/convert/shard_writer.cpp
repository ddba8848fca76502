#include "convert/shard_writer.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "checkpoint/safetensors_header.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

void sort_tensors(std::vector<PlannedTensor>& tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const PlannedTensor& a, const PlannedTensor& b) {
    const int wide_a = bits(a.dtype), wide_b = bits(b.dtype);
    return wide_a != wide_b ? wide_a > wide_b : a.name < b.name;
  });
}

// The length and the header, of tensors in order.
std::string header_of(const std::vector<PlannedTensor>& tensors, const ShardMetadata& metadata) {
  std::vector<WrittenTensor> written;
  for (const PlannedTensor& tensor : tensors) {
    written.push_back({.name = tensor.name,
                       .dtype = tensor.dtype,
                       .shape = tensor.shape,
                       .bytes = tensor.bytes()});
  }
  const std::string text = write_safetensors_header(written, metadata);
  std::string length(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i));
  return length + text;
}

}  // namespace

std::int64_t PlannedTensor::bytes() const {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) elements = checked_product("tensor", elements, size);
  return shunt::bytes(dtype, elements);
}

std::int64_t ShardWriter::planned_bytes(const std::vector<PlannedTensor>& tensors,
                                        const ShardMetadata& metadata) {
  std::vector<PlannedTensor> sorted = tensors;
  sort_tensors(sorted);
  auto total = static_cast<std::int64_t>(header_of(sorted, metadata).size());
  for (const PlannedTensor& tensor : tensors) total += tensor.bytes();
  return total;
}

ShardWriter::ShardWriter(std::string path, std::vector<PlannedTensor> tensors,
                         const ShardMetadata& metadata)
    : path_(std::move(path)) {
  sort_tensors(tensors);
  const std::string header = header_of(tensors, metadata);
  if (header.size() - 8 > max_header_bytes) {
    fail(Status::invalid_argument, "{}: its header takes {} bytes: at most {}", path_,
         header.size() - 8, max_header_bytes);
  }
  auto at = static_cast<std::int64_t>(header.size());
  for (const PlannedTensor& tensor : tensors) {
    if (!places_.emplace(tensor.name, Place{.begin = at, .size = tensor.bytes()}).second) {
      fail(Status::internal, "{}: tensor '{}' is planned twice", path_, tensor.name);
    }
    at += tensor.bytes();
  }
  file_bytes_ = at;
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (file_ < 0) refuse_io("cannot be created");
  try {
    write_at(header.data(), header.size(), 0);
  } catch (...) {  // the destructor does not run
    ::close(file_);
    throw;
  }
}

ShardWriter::~ShardWriter() {
  if (file_ >= 0) ::close(file_);
}

void ShardWriter::refuse_io(const char* what) const {
  fail(Status::io, "{}: {}: {}", path_, what, std::strerror(errno));
}

void ShardWriter::write_at(const void* data, std::size_t size, std::int64_t at) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t done = ::pwrite(file_, next, std::min(size, std::size_t{1} << 26), at);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) refuse_io("cannot be written");
    next += done;
    at += done;
    size -= static_cast<std::size_t>(done);
  }
}

void ShardWriter::write(const std::string& name, const void* data, std::size_t size,
                        std::size_t offset) {
  const auto place = places_.find(name);
  if (place == places_.end() || static_cast<std::int64_t>(offset + size) > place->second.size) {
    fail(Status::internal, "{}: tensor '{}' was not planned with {} bytes", path_, name,
         offset + size);
  }
  write_at(data, size, place->second.begin + static_cast<std::int64_t>(offset));
  place->second.written += static_cast<std::int64_t>(size);
}

void ShardWriter::finish() {
  for (const auto& [name, place] : places_) {
    if (place.written != place.size) {
      fail(Status::internal, "{}: tensor '{}' has {} of its {} bytes", path_, name, place.written,
           place.size);
    }
  }
  if (::fsync(file_) != 0) refuse_io("cannot be written");
  const int closed = ::close(file_);
  file_ = -1;
  if (closed != 0) refuse_io("cannot be written");
}

}  // namespace shunt
