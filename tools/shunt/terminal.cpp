#include "terminal.hpp"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace shunt::tool {

bool colour_wanted() {
  static const bool wanted = [] {
    const char* no_colour = std::getenv("NO_COLOR");
    const char* term = std::getenv("TERM");
    return isatty(STDOUT_FILENO) == 1 && (no_colour == nullptr || *no_colour == '\0') &&
           term != nullptr && std::string_view(term) != "dumb";
  }();
  return wanted;
}

std::string paint(Style style, std::string_view text) {
  static constexpr std::array<const char*, 6> codes = {"", "1", "2", "32", "31", "33"};
  const char* code = codes[static_cast<std::size_t>(style)];
  if (style == Style::plain || text.empty() || !colour_wanted()) return std::string(text);
  return fmt::format("\033[{}m{}\033[0m", code, text);
}

void tell(std::string_view text) {
  (void)std::fwrite(text.data(), 1, text.size(), stderr);
  (void)std::fflush(stderr);
}

int columns(std::string_view text) {
  return static_cast<int>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

std::vector<std::string> wrapped(std::string_view text, int width) {
  std::vector<std::string> lines;
  std::string line;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    if (!line.empty() && columns(line) + 1 + columns(word) > width) {
      lines.push_back(line);
      line.clear();
    }
    if (!line.empty()) line += ' ';
    line += word;
    begin = end + 1;
  }
  if (!line.empty()) lines.push_back(line);
  return lines;
}

std::string wrap(std::string_view text, int indent) {
  std::string out;
  for (const auto& line : wrapped(text, page_width - indent)) {
    out += std::string(static_cast<std::size_t>(indent), ' ') + line + "\n";
  }
  return out;
}

void Table::fact(const std::string& label, const std::string& text, int room) {
  const auto lines = wrapped(text, room);
  for (std::size_t i = 0; i < lines.size(); ++i) row({i == 0 ? label : std::string(), lines[i]});
}

void Table::heading(const std::vector<std::string>& cells) {
  std::vector<Cell> row;
  row.reserve(cells.size());
  for (const auto& cell : cells) row.emplace_back(cell, Style::dim);
  rows_.push_back(std::move(row));
}

std::vector<int> Table::widths() const {
  std::vector<int> widths(alignment_.size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size() && i < widths.size(); ++i) {
      widths[i] = std::max(widths[i], columns(row[i].text));
    }
  }
  return widths;
}

int Table::width() const {
  int sum = 0;
  for (const int width : widths()) sum += width + gap_;
  return sum - gap_;
}

std::string Table::str(int indent) const {
  const std::vector<int> widths = this->widths();
  std::string out;
  for (const auto& row : rows_) {
    std::string line(static_cast<std::size_t>(indent), ' ');
    std::size_t pending = 0;  // padding is written only when something follows: no trailing blanks
    for (std::size_t i = 0; i < row.size() && i < widths.size(); ++i) {
      const auto pad = static_cast<std::size_t>(widths[i] - columns(row[i].text));
      if (i > 0) pending += static_cast<std::size_t>(gap_);
      if (row[i].text.empty()) {
        pending += pad;
        continue;
      }
      if (alignment_[i] == '>') pending += pad;
      line.append(pending, ' ');
      line += paint(row[i].style, row[i].text);
      pending = alignment_[i] == '>' ? 0 : pad;
    }
    out += line + "\n";
  }
  return out;
}

std::string three_digits(double value) {
  if (!std::isfinite(value)) return "-";
  const double magnitude = std::fabs(value);
  if (magnitude >= 99.95) return fmt::format("{:.0f}", value);
  if (magnitude >= 9.995) return fmt::format("{:.1f}", value);
  return fmt::format("{:.2f}", value);
}

namespace {

std::string scaled(double value, std::string_view unit) {
  static constexpr std::array<const char*, 6> prefixes = {"", "k", "M", "G", "T", "P"};
  std::size_t i = 0;
  while (std::fabs(value) >= 999.5 && i + 1 < prefixes.size()) {
    value /= 1000;
    ++i;
  }
  if (i == 0 && value == std::floor(value)) return fmt::format("{:.0f} {}", value, unit);
  return fmt::format("{} {}{}", three_digits(value), prefixes[i], unit);
}

}  // namespace

std::string duration(double us) {
  if (!std::isfinite(us)) return "-";
  if (us < 0.9995) return three_digits(us * 1e3) + " ns";
  if (us < 999.5) return three_digits(us) + " us";
  if (us < 999.5e3) return three_digits(us / 1e3) + " ms";
  return three_digits(us / 1e6) + " s";
}
std::string size(double bytes) { return scaled(bytes, "B"); }
std::string operations(double flops) { return scaled(flops, "FLOP"); }
std::string rate(double per_second, std::string_view unit) { return scaled(per_second, unit); }
std::string percent(double share) {
  return std::isfinite(share) ? fmt::format("{:.0f} %", share * 100) : "-";
}

std::string bars(const std::vector<std::int64_t>& values, int width) {
  if (values.empty()) return {};
  static const bool ascii = [] {
    for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
      const char* value = std::getenv(name);
      if (value == nullptr || *value == '\0') continue;
      const std::string_view locale = value;
      return locale == "C" || locale == "POSIX";
    }
    return false;
  }();
  static constexpr std::array<const char*, 9> blocks = {" ", "▁", "▂", "▃", "▄",
                                                        "▅", "▆", "▇", "█"};
  static constexpr std::array<const char*, 9> letters = {" ", ".", ":", "-", "=",
                                                         "+", "*", "#", "@"};

  const auto count = static_cast<std::int64_t>(values.size());
  const std::int64_t buckets = std::min<std::int64_t>(count, width);
  std::vector<double> means;
  for (std::int64_t b = 0; b < buckets; ++b) {
    const std::int64_t begin = count * b / buckets;
    const std::int64_t end = count * (b + 1) / buckets;
    double sum = 0;
    for (std::int64_t i = begin; i < end; ++i)
      sum += static_cast<double>(values[static_cast<std::size_t>(i)]);
    means.push_back(sum / static_cast<double>(end - begin));
  }
  const double top = *std::max_element(means.begin(), means.end());
  std::string out;
  for (double mean : means) {
    // Anything at all shows: an empty bar is an expert without tokens.
    const auto level = top > 0 ? static_cast<std::size_t>(std::ceil(mean / top * 8)) : 0;
    out += ascii ? letters[level] : blocks[level];
  }
  return out;
}

}  // namespace shunt::tool
