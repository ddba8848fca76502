// The safetensors file format: a length, a JSON header, and tensors.
// https://github.com/huggingface/safetensors#format
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shunt/error.hpp"
#include "shunt/tensor.hpp"

namespace shunt {

// A file mapped into memory, read only. Its views live as long as any copy of this object.
// No number in the header is trusted: open() throws Error{bad_file} naming the file, the tensor and
// the value for anything truncated, overlapping, out of range or overflowing. A tensor that lies at
// no multiple of its element's size, as where a writer did not fill the header up, is copied when
// it is first asked for; the copy lives as long as the file. Any number of threads may use one at
// once.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const;
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const;
  Tensor get(const std::string& name) const;  // throws Error{bad_file} when it is not there
  // Its sizes, and its elements one after the other: of any number of dimensions, where get() takes
  // max_rank at most.
  std::vector<std::int64_t> shape(const std::string& name) const;
  Tensor flat(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

// Writes dense CPU tensors to `path`: into a temporary file beside it that is renamed when whole,
// so that a reader never sees half a file. Throws Error{io} (no space, no permission).
void write_safetensors(const std::string& path,
                       const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace shunt
