// Which modules quantization_config leaves plain, by the lists that each method keeps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/regex.hpp"

namespace shunt {

// What lists say of a module. Programs read the same list in different ways (a name that is a part
// of another, a prefix that ends within a word, other roots of the names): where they disagree it
// is `perhaps`, and tensors tell.
enum class Listed { no, perhaps, yes };

enum class ListSyntax {
  transformers,  // names of modules and of what holds them, or regular expressions
  compressed,    // compressed-tensors: whole names, "re:" and a regular expression, class names
  globs,         // ModelOpt: * and ?
};

class ModuleList {
 public:
  // Throws Error{unsupported} for a regular expression that is not read, and for too many of them.
  void add(ListSyntax syntax, const std::string& text);
  bool empty() const { return entries_.empty(); }
  // `module`: "model.layers.3.mlp.experts.7.gate_proj". `by`: the entry that decided, for messages.
  Listed find(const std::string& module, std::string* by = nullptr) const;

 private:
  struct Entry {
    ListSyntax syntax;
    std::string text;
    std::shared_ptr<const Regex> regex;  // of a regular expression
  };
  static Listed find_one(const Entry& entry, const std::string& module);
  std::vector<Entry> entries_;
  std::size_t steps_ = 0;  // of all regular expressions
};

}  // namespace shunt
