#include "checkpoint/regex.hpp"

#include <cctype>
#include <memory>

#include "checkpoint/strict_json.hpp"
#include "core/check.hpp"

namespace shunt {

namespace {

constexpr std::size_t most_steps_written = 2000;
constexpr int most_repeats = 1000;
constexpr int deepest = 50;

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Of a letter behind a backslash: d w s, and their capitals.
bool class_of(char letter, std::bitset<256>& set) {
  const char low = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  if (low != 'd' && low != 'w' && low != 's') return false;
  for (std::size_t c = 0; c < 256; ++c) {
    const auto value = static_cast<char>(c);
    const bool in = low == 'd'   ? std::isdigit(static_cast<unsigned char>(value)) != 0
                    : low == 'w' ? is_word(value)
                                 : std::isspace(static_cast<unsigned char>(value)) != 0;
    if (in == (low == letter)) set.set(c);
  }
  return true;
}

}  // namespace

// Reads a pattern by descent and appends its steps.
class RegexParser {
 public:
  RegexParser(std::string_view pattern, std::vector<Regex::Step>& steps)
      : pattern_(pattern), steps_(steps) {}

  void parse() {
    alternatives(0);
    if (at_ < pattern_.size()) refuse("an unmatched )");
    add({.kind = Regex::Step::done});
  }

 private:
  using Step = Regex::Step;

  [[noreturn]] void refuse(std::string_view what) const {
    fail(Status::unsupported, "regular expression '{}' holds {} at {}: not read", clean(pattern_),
         what, at_);
  }
  bool more() const { return at_ < pattern_.size(); }
  char peek() const { return more() ? pattern_[at_] : '\0'; }
  bool take(std::string_view text) {
    if (pattern_.substr(at_, text.size()) != text) return false;
    at_ += text.size();
    return true;
  }
  std::size_t add(Step step) {
    if (steps_.size() >= most_steps_written) refuse("too much");
    steps_.push_back(step);
    return steps_.size() - 1;
  }

  void alternatives(int depth) {
    if (depth > deepest) refuse("too many groups in one another");
    const std::size_t first = steps_.size();
    sequence(depth);
    if (!take("|")) return;
    // A fork before what stands there, and a jump behind it.
    insert(first, {.kind = Step::fork});
    const std::size_t jump = add({.kind = Step::jump});
    steps_[first].one = first + 1;
    steps_[first].other = steps_.size();
    alternatives(depth);
    steps_[jump].one = steps_.size();
  }
  void sequence(int depth) {
    while (more() && peek() != '|' && peek() != ')') repeated(depth);
  }

  // Steps from `at` on move by one, and whatever points behind it.
  void insert(std::size_t at, Step step) {
    add({.kind = Step::jump});
    for (std::size_t i = steps_.size() - 1; i > at; --i) steps_[i] = steps_[i - 1];
    steps_[at] = step;
    for (std::size_t i = at + 1; i < steps_.size(); ++i) {
      if (steps_[i].one >= at) ++steps_[i].one;
      if (steps_[i].other >= at) ++steps_[i].other;
    }
  }
  // A copy of steps [begin, end) at the end.
  void repeat_steps(const std::vector<Step>& body, std::size_t from) {
    const std::size_t to = steps_.size();
    for (Step step : body) {
      step.one += to - from;
      step.other += to - from;
      add(step);
    }
  }

  void repeated(int depth) {
    const std::size_t first = steps_.size();
    atom(depth);
    while (more()) {
      int least = 0, most = -1;  // -1: any number
      if (take("+")) {
        least = 1;
      } else if (take("?")) {
        most = 1;
      } else if (!take("*") && (peek() != '{' || !counts(least, most))) {
        return;
      }
      (void)take("?");  // what a match ends with does not matter
      const std::vector<Step> body(steps_.begin() + static_cast<std::ptrdiff_t>(first),
                                   steps_.end());
      steps_.resize(first);
      for (int i = 0; i < least; ++i) repeat_steps(body, first);
      if (most < 0) {
        const std::size_t fork = add({.kind = Step::fork});
        steps_[fork].one = fork + 1;
        repeat_steps(body, first);
        add({.kind = Step::jump, .one = fork});
        steps_[fork].other = steps_.size();
      }
      for (int i = least; i < most; ++i) {
        const std::size_t fork = add({.kind = Step::fork});
        steps_[fork].one = fork + 1;
        repeat_steps(body, first);
        steps_[fork].other = steps_.size();
      }
    }
  }
  // {m}, {m,}, {,n}, {m,n}; anything else is characters.
  bool counts(int& least, int& most) {
    std::size_t at = at_ + 1;
    const auto number = [&](int absent) {
      int value = absent;
      for (bool any = false;
           at < pattern_.size() && std::isdigit(static_cast<unsigned char>(pattern_[at])) != 0;
           ++at, any = true) {
        value = (any ? value : 0) * 10 + (pattern_[at] - '0');
        if (value > most_repeats) refuse("too many repeats");
      }
      return value;
    };
    const std::size_t start = at;
    least = number(0);
    most = least;
    if (at < pattern_.size() && pattern_[at] == ',') {
      ++at;
      most = number(-1);
    } else if (at == start) {
      return false;
    }
    if (at >= pattern_.size() || pattern_[at] != '}') return false;
    if (most >= 0 && most < least) refuse("a smaller number behind a larger");
    at_ = at + 1;
    return true;
  }

  void atom(int depth) {
    if (take("(?=") || take("(?!")) {
      const bool negative = pattern_[at_ - 1] == '!';
      const std::size_t look = add({.kind = negative ? Step::not_ahead : Step::ahead});
      alternatives(depth + 1);
      add({.kind = Step::done});
      steps_[look].one = steps_.size();
      close();
    } else if (take("(?:") || (peek() == '(' && pattern_.substr(at_, 2) != "(?" && take("("))) {
      alternatives(depth + 1);
      close();
    } else if (peek() == '(') {
      refuse("a group of a kind");
    } else if (take("^") || take("\\A")) {
      add({.kind = Step::begin});
    } else if (take("$") || take("\\Z")) {
      add({.kind = Step::end});
    } else if (take("\\b")) {
      add({.kind = Step::edge});
    } else if (take("\\B")) {
      add({.kind = Step::no_edge});
    } else if (peek() == '*' || peek() == '+' || peek() == '?') {
      refuse("a repeat of nothing");
    } else if (take(".")) {
      add({.kind = Step::chars, .set = ~std::bitset<256>{}});
    } else if (take("[")) {
      set();
    } else {
      std::bitset<256> one;
      character(one);
      add({.kind = Step::chars, .set = one});
    }
  }
  void close() {
    if (!take(")")) refuse("an unmatched (");
  }
  // A character or a class, escaped or not; the character, or -1.
  int character(std::bitset<256>& to) {
    char c = peek();
    ++at_;
    if (c == '\\') {
      if (!more()) refuse("a \\ at its end");
      c = peek();
      ++at_;
      if (class_of(c, to)) return -1;
      if (std::isalnum(static_cast<unsigned char>(c)) != 0) refuse("an escaped letter or digit");
    }
    to.set(static_cast<unsigned char>(c));
    return static_cast<unsigned char>(c);
  }
  void set() {
    const bool negative = take("^");
    std::bitset<256> all;
    for (bool first = true; first || peek() != ']'; first = false) {
      if (!more()) refuse("an unmatched [");
      const int low = character(all);
      if (low < 0 || peek() != '-' || pattern_.substr(at_, 2) == "-]") continue;
      ++at_;
      if (!more()) refuse("an unmatched [");
      std::bitset<256> last;
      const int high = character(last);
      if (high < low) refuse("a range that falls");
      for (int c = low; c <= high; ++c) all.set(static_cast<std::size_t>(c));
    }
    ++at_;
    add({.kind = Step::chars, .set = negative ? ~all : all});
  }

  std::string_view pattern_;
  std::size_t at_ = 0;
  std::vector<Step>& steps_;
};

Regex::Regex(std::string_view pattern) { RegexParser(pattern, steps_).parse(); }

// All steps that can be at work are followed at once, one character after the other.
std::vector<std::size_t> Regex::run(std::size_t first, std::string_view text, std::size_t from,
                                    Looked& looked) const {
  std::vector<std::size_t> result, now{first}, next;
  std::vector<std::size_t> seen(steps_.size(), text.size() + 2);
  for (std::size_t at = from; at <= text.size() && !now.empty(); ++at) {
    next.clear();
    bool ends = false;
    for (std::size_t i = 0; i < now.size(); ++i) {  // grows meanwhile
      const std::size_t index = now[i];
      if (seen[index] == at) continue;
      seen[index] = at;
      const Step& step = steps_[index];
      const bool before = at > 0 && is_word(text[at - 1]);
      const bool after = at < text.size() && is_word(text[at]);
      switch (step.kind) {
        case Step::chars:
          if (at < text.size() && step.set[static_cast<unsigned char>(text[at])]) {
            next.push_back(index + 1);
          }
          break;
        case Step::fork:
          now.push_back(step.one);
          now.push_back(step.other);
          break;
        case Step::jump:
          now.push_back(step.one);
          break;
        case Step::begin:
          if (at == 0) now.push_back(index + 1);
          break;
        case Step::end:
          if (at == text.size()) now.push_back(index + 1);
          break;
        case Step::edge:
          if (before != after) now.push_back(index + 1);
          break;
        case Step::no_edge:
          if (before == after) now.push_back(index + 1);
          break;
        case Step::ahead:
        case Step::not_ahead:
          if (begins(index, text, at, looked) == (step.kind == Step::ahead)) {
            now.push_back(step.one);
          }
          break;
        case Step::done:
          ends = true;
          break;
      }
    }
    if (ends) result.push_back(at);
    now.swap(next);
  }
  return result;
}

std::vector<std::size_t> Regex::ends(std::string_view text, std::size_t from) const {
  Looked looked;
  return run(0, text, from, looked);
}

bool Regex::search(std::string_view text) const {
  Looked looked;
  for (std::size_t from = 0; from <= text.size(); ++from) {
    if (!run(0, text, from, looked).empty()) return true;
  }
  return false;
}

bool Regex::begins(std::size_t ahead, std::string_view text, std::size_t at, Looked& looked) const {
  const std::pair place(ahead, at);
  if (const auto known = looked.find(place); known != looked.end()) return known->second;
  const bool found = !run(ahead + 1, text, at, looked).empty();
  looked.emplace(place, found);
  return found;
}

bool matches_glob(std::string_view pattern, std::string_view text) {
  // Of a set at `at`, behind its [: whether it is one, whether it holds c, and where it ends.
  const auto in_set = [&](std::size_t at, char c, bool& inside) -> std::size_t {
    const bool negative = at < pattern.size() && pattern[at] == '!';
    if (negative) ++at;
    const std::size_t first = at;
    bool found = false;
    for (; at < pattern.size() && (pattern[at] != ']' || at == first); ++at) {
      char low = pattern[at], high = low;
      if (at + 2 < pattern.size() && pattern[at + 1] == '-' && pattern[at + 2] != ']') {
        high = pattern[at + 2];
        at += 2;
      }
      found = found || (low <= c && c <= high);
    }
    if (at >= pattern.size()) return 0;
    inside = found != negative;
    return at + 1;
  };
  std::size_t p = 0, t = 0, star = std::string_view::npos, resumed = 0;
  while (t < text.size()) {
    bool inside = false;
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resumed = t;
      continue;
    }
    if (p < pattern.size()) {
      if (pattern[p] == '[') {
        if (const std::size_t end = in_set(p + 1, text[t], inside); end > 0) {
          if (inside) {
            p = end;
            ++t;
            continue;
          }
        } else if (text[t] == '[') {
          ++p;
          ++t;
          continue;
        }
      } else if (pattern[p] == '?' || pattern[p] == text[t]) {
        ++p;
        ++t;
        continue;
      }
    }
    if (star == std::string_view::npos) return false;
    p = star + 1;
    t = ++resumed;
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace shunt
