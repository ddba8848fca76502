// What lies in a checkpoint's folder beside what a conversion makes anew.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/tensor_store.hpp"

namespace shunt {

struct Beside {
  std::map<std::string, std::int64_t> copied;  // files: the tokenizer, the text of a model; bytes
  // Folders, links to nothing, weights in other forms or of other models, what another precision
  // recorded; and tensors that the index does not name, a line a file.
  std::vector<std::string> left_out;
};
// `made`: names of files that the conversion makes itself. Throws Error{io} for a file to be copied
// that cannot be read.
Beside beside_tensors(const std::string& folder, const TensorStore& store,
                      const std::set<std::string>& made);

}  // namespace shunt
