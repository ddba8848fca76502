#include "checkpoint/excluded.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>

#include "core/check.hpp"

namespace shunt {

namespace {

constexpr std::string_view regex_mark = "re:";
// Lists of hundreds of expressions; files that nobody vouches for must not take all memory.
constexpr std::size_t most_steps = 100'000;

// From "layers." on: checkpoints and programs put "model.", "language_model." and more before it.
std::string_view from_layers(std::string_view name) {
  const std::size_t at = name.find("layers.");
  return at == std::string_view::npos ? name : name.substr(at);
}

// `name` is `text` or lies in it.
bool within(std::string_view name, std::string_view text) {
  return name.starts_with(text) && (name.size() == text.size() || name[text.size()] == '.');
}

bool is_regex(const std::string& text) {
  return text.find_first_of("*+?[](){}|^$\\") != std::string::npos;
}

}  // namespace

void ModuleList::add(ListSyntax syntax, const std::string& text) {
  if (text.empty()) return;
  Entry entry{.syntax = syntax, .text = text, .regex = nullptr};
  if (syntax == ListSyntax::compressed && text.starts_with(regex_mark)) {
    entry.regex = std::make_shared<const Regex>(std::string_view(text).substr(regex_mark.size()));
  } else if (syntax == ListSyntax::transformers && is_regex(text)) {
    // "model.layers.*." is meant as a glob as often.
    entry.regex = std::make_shared<const Regex>(text);
  }
  if (entry.regex != nullptr) steps_ += entry.regex->steps();
  if (steps_ > most_steps) {
    fail(Status::unsupported, "regular expressions take {} steps in all: read are {} at most",
         steps_, most_steps);
  }
  entries_.push_back(std::move(entry));
}

Listed ModuleList::find_one(const Entry& entry, const std::string& module) {
  const std::string& text = entry.text;
  if (entry.regex != nullptr) {
    const std::vector<std::size_t> ends = entry.regex->ends(module);
    const bool whole = std::any_of(ends.begin(), ends.end(), [&](std::size_t end) {
      return end == module.size() || module[end] == '.' || (end > 0 && module[end - 1] == '.');
    });
    if (!ends.empty() && (entry.syntax == ListSyntax::compressed || whole)) return Listed::yes;
    if (!ends.empty() || entry.regex->search(module)) return Listed::perhaps;
    return Listed::no;
  }
  if (entry.syntax == ListSyntax::globs) {
    if (matches_glob(text, module)) return Listed::yes;
    return matches_glob(fmt::format("*{}*", text), module) ||
                   matches_glob(fmt::format("*{}*", from_layers(text)), module)
               ? Listed::perhaps
               : Listed::no;
  }
  if (module == text || (entry.syntax == ListSyntax::transformers && within(module, text))) {
    return Listed::yes;
  }
  return within(from_layers(module), from_layers(text)) || module.find(text) != std::string::npos
             ? Listed::perhaps
             : Listed::no;
}

Listed ModuleList::find(const std::string& module, std::string* by) const {
  Listed result = Listed::no;
  for (const Entry& entry : entries_) {
    const Listed here = find_one(entry, module);
    if (here <= result) continue;
    result = here;
    if (by != nullptr) *by = entry.text;
    if (result == Listed::yes) break;
  }
  return result;
}

}  // namespace shunt
