// Regular expressions as quantization_config has them in lists of modules: Python's syntax, as far
// as such lists use it.
#pragma once

#include <bitset>
#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shunt {

// Matching takes time in proportion to the squares of the text's length and the pattern's at most,
// whatever the pattern: files that nobody vouches for bring them.
class Regex {
 public:
  // Characters, . [..] \d \w \s \b and their capitals, groups, |, * + ? {m,n} greedy or not, ^ $,
  // (?:..) (?=..) (?!..). Throws Error{unsupported} saying what else it holds, or that it is too
  // long.
  explicit Regex(std::string_view pattern);

  // Where matches of `text` that begin at `from` may end, ascending: Python's match() finds one if
  // there is any.
  std::vector<std::size_t> ends(std::string_view text, std::size_t from = 0) const;
  bool search(std::string_view text) const;
  std::size_t steps() const { return steps_.size(); }

 private:
  friend class RegexParser;
  struct Step {
    enum Kind { chars, fork, jump, begin, end, edge, no_edge, ahead, not_ahead, done } kind;
    std::bitset<256> set{};  // chars
    std::size_t one = 0;     // fork, jump: the next step; ahead: behind the inner steps
    std::size_t other = 0;   // fork: the next step as well
  };
  // Of a step that looks ahead, at a place in the text: whether what it holds begins there.
  using Looked = std::map<std::pair<std::size_t, std::size_t>, bool>;
  std::vector<std::size_t> run(std::size_t first, std::string_view text, std::size_t from,
                               Looked& looked) const;
  bool begins(std::size_t ahead, std::string_view text, std::size_t at, Looked& looked) const;
  std::vector<Step> steps_;
};

// Python's fnmatch: * ? [seq] [!seq], all of the text.
bool matches_glob(std::string_view pattern, std::string_view text);

}  // namespace shunt
