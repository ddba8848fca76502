#include "shunt/safetensors.hpp"

#include <cstring>
#include <mutex>

#include "checkpoint/mapped_file.hpp"
#include "checkpoint/safetensors_header.hpp"
#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {

struct SafetensorsFile::Impl {
  explicit Impl(const std::string& file)
      : path(file),
        mapped(file),
        header(read_safetensors_header(file, mapped.data(), mapped.size())) {}

  // Where a tensor's elements are, aligned. Nothing writes through what is returned.
  void* elements(const std::string& name, const TensorEntry& entry) const {
    const unsigned char* const there = mapped.data() + entry.begin;
    const auto alignment = static_cast<std::uint64_t>(bits(entry.dtype) + 7) / 8;
    if (entry.begin % alignment == 0) return const_cast<unsigned char*>(there);
    const std::scoped_lock lock(copies_in_use);
    std::unique_ptr<unsigned char[]>& copy = copies[name];
    if (copy == nullptr) {
      const std::size_t size = entry.end - entry.begin;
      copy = std::make_unique_for_overwrite<unsigned char[]>(size);
      std::memcpy(copy.get(), there, size);
    }
    return copy.get();
  }

  std::string path;
  MappedFile mapped;
  SafetensorsHeader header;

 private:
  mutable std::mutex copies_in_use;
  mutable std::map<std::string, std::unique_ptr<unsigned char[]>> copies;
};

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file;
  file.impl_ = std::make_shared<const Impl>(path);
  return file;
}

namespace {
template <class Impl>
const Impl& opened_file(const std::shared_ptr<const Impl>& impl) {
  return held(impl, "safetensors file", "SafetensorsFile::open()");
}
}  // namespace

const std::string& SafetensorsFile::path() const { return opened_file(impl_).path; }

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> result;
  result.reserve(opened_file(impl_).header.tensors.size());
  for (const auto& [name, entry] : opened_file(impl_).header.tensors) result.push_back(name);
  return result;
}

bool SafetensorsFile::contains(const std::string& name) const {
  return opened_file(impl_).header.tensors.contains(name);
}

namespace {

const TensorEntry& entry_of(const SafetensorsHeader& header, const std::string& path,
                            const std::string& name) {
  const auto found = header.tensors.find(name);
  if (found == header.tensors.end()) {
    fail(Status::bad_file, "{}: has no tensor '{}'", path, clean(name));
  }
  return found->second;
}

}  // namespace

std::vector<std::int64_t> SafetensorsFile::shape(const std::string& name) const {
  return entry_of(opened_file(impl_).header, opened_file(impl_).path, name).shape;
}

Tensor SafetensorsFile::flat(const std::string& name) const {
  const TensorEntry& entry = entry_of(opened_file(impl_).header, opened_file(impl_).path, name);
  Tensor tensor;
  tensor.data = impl_->elements(name, entry);
  tensor.dtype = entry.dtype;
  tensor.rank = 1;
  tensor.shape[0] = 1;
  for (const std::int64_t size : entry.shape) tensor.shape[0] *= size;
  tensor.strides[0] = 1;
  return tensor;
}

Tensor SafetensorsFile::get(const std::string& name) const {
  const TensorEntry& entry = entry_of(opened_file(impl_).header, opened_file(impl_).path, name);
  if (entry.shape.size() > static_cast<std::size_t>(max_rank)) {
    fail(Status::bad_file, "{}: tensor '{}' has {} dimensions: must be at most {}",
         opened_file(impl_).path, clean(name), entry.shape.size(), max_rank);
  }
  Tensor tensor;
  tensor.data = impl_->elements(name, entry);
  tensor.dtype = entry.dtype;
  tensor.rank = static_cast<int>(entry.shape.size());
  std::int64_t stride = 1;
  for (std::size_t d = entry.shape.size(); d-- > 0;) {
    tensor.shape[d] = entry.shape[d];
    tensor.strides[d] = stride;
    stride *= entry.shape[d] == 0 ? 1 : entry.shape[d];
  }
  return tensor;
}

const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return opened_file(impl_).header.metadata;
}

}  // namespace shunt
