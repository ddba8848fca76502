// Text for people: colour where a terminal shows it, aligned columns, numbers with units.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shunt::tool {

inline constexpr int page_width = 100;

enum class Style { plain, bold, dim, good, bad, warn };
// Standard output is a terminal that is not dumb, and NO_COLOR is not set.
bool colour_wanted();
std::string paint(Style style, std::string_view text);

// To standard error, as it is; lost where that cannot be written.
void tell(std::string_view text);

// Columns that `text` takes: code points, which is right for everything printed here.
int columns(std::string_view text);
// Text broken at spaces into lines of at most `width` columns, where words allow.
std::vector<std::string> wrapped(std::string_view text, int width);
// The same for a page: every line indented and ended.
std::string wrap(std::string_view text, int indent);

struct Cell {
  std::string text;
  Style style = Style::plain;
  Cell(const char* t) : text(t) {}                                               // NOLINT
  Cell(std::string t, Style s = Style::plain) : text(std::move(t)), style(s) {}  // NOLINT
};

// Rows of cells under headings, padded to columns.
class Table {
 public:
  // One character a column: '<' or '>' for the side that text is flush with.
  explicit Table(std::string alignment, int gap = 2)
      : alignment_(std::move(alignment)), gap_(gap) {}
  void heading(const std::vector<std::string>& cells);
  void row(std::vector<Cell> cells) { rows_.push_back(std::move(cells)); }
  // A label and a text that wraps within its column of `room` columns.
  void fact(const std::string& label, const std::string& text, int room);
  int width() const;  // columns of the longest row
  std::string str(int indent = 0) const;

 private:
  std::vector<int> widths() const;
  std::string alignment_;
  int gap_;
  std::vector<std::vector<Cell>> rows_;
};

// Three significant digits: "0.95", "31.2", "1234".
std::string three_digits(double value);
std::string duration(double microseconds);  // "950 ns", "31.2 us", "2.61 ms", "1.20 s"
std::string size(double bytes);             // "512 B", "75.5 MB", "1.21 GB"
std::string operations(double flops);       // "201 MFLOP"
std::string rate(double per_second, std::string_view unit);  // "44.1 GB/s": unit is "B/s"
std::string percent(double share);                           // "87 %"

// How often each value occurs as a line of bars, at most `width` wide (neighbours are then summed).
std::string bars(const std::vector<std::int64_t>& values, int width);

}  // namespace shunt::tool
