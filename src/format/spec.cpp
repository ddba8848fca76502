// The names of weight formats, and what each costs in bits.
#include <fmt/core.h>

#include <array>
#include <charconv>
#include <string_view>

#include "core/check.hpp"
#include "format/rules.hpp"
#include "shunt/format.hpp"

namespace shunt {

namespace {

struct Row {
  Format format;
  std::string_view name;
  double bits;  // a weight of a large matrix; int4: without its scales
};

constexpr std::array rows = {
    Row{Format::plain, "plain", 0},
    Row{Format::fp8_tensor, "fp8_tensor", 8},
    Row{Format::fp8_channel, "fp8_channel", 8},
    Row{Format::fp8_block, "fp8_block", 8 + 32.0 / (128 * 128)},
    Row{Format::mxfp8, "mxfp8", 8 + 8.0 / 32},
    Row{Format::nvfp4, "nvfp4", 4 + 8.0 / 16},
    Row{Format::mxfp4, "mxfp4", 4 + 8.0 / 32},
    Row{Format::int8, "int8", 8},
    Row{Format::int4, "int4", 4},
    Row{Format::dense3, "dense3", 3 + 8.0 / 32},
    Row{Format::sparse_nvfp4, "sparse_nvfp4", 2 + 1 + 8.0 / 16},
};

constexpr int default_group = 32;
constexpr std::string_view ordered_ending = ":ordered", zeros_ending = ":zeros";

// Null for a number that is none of the enumeration.
const Row* find_row(Format format) {
  const auto at = static_cast<std::size_t>(format);
  return at < rows.size() ? &rows[at] : nullptr;
}

}  // namespace

bool is_known(Format format) { return find_row(format) != nullptr; }

std::string to_string(RowFormat format) {
  switch (format) {
    case RowFormat::as_dtype:
      return "as_dtype";
    case RowFormat::fp8_token:
      return "fp8_token";
    case RowFormat::fp8_block:
      return "fp8_block";
    case RowFormat::nvfp4:
      return "nvfp4";
  }
  return std::to_string(static_cast<int>(format));
}

std::string to_string(const FormatSpec& spec) {
  const Row* const row = find_row(spec.format);
  const std::string name =
      row != nullptr ? std::string(row->name) : std::to_string(static_cast<int>(spec.format));
  const std::string group = spec.group > 0 ? fmt::format(":{}", spec.group) : "";
  return fmt::format("{}{}{}{}", name, group, spec.ordered ? ordered_ending : "",
                     spec.zeros ? zeros_ending : "");
}

FormatSpec format_from_string(const std::string& text) {
  std::string_view all = text;
  const auto ends_with = [&all](std::string_view ending) {
    const bool does = all.ends_with(ending);
    if (does) all.remove_suffix(ending.size());
    return does;
  };
  const bool zeros = ends_with(zeros_ending), ordered = ends_with(ordered_ending);
  const std::size_t colon = all.find(':');
  for (const Row& row : rows) {
    if (row.name != all.substr(0, colon)) continue;
    FormatSpec spec{.format = row.format, .ordered = ordered, .zeros = zeros};
    if (spec != spec.of_matrix() && row.format != Format::int4) {
      fail(Status::invalid_argument, "format is '{}': only int4 can be ordered or have zeros",
           text);
    }
    if (colon == std::string_view::npos) return spec;
    const std::string_view digits = all.substr(colon + 1);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), spec.group);
    if (row.format == Format::int4 && error == std::errc{} && end == all.data() + all.size() &&
        spec.group > 0 && spec.group % 16 == 0) {
      return spec;
    }
    fail(Status::invalid_argument,
         "format is '{}': only int4 has a group, a multiple of 16 below 2^31, before :ordered, and "
         "that before :zeros: int4:64:ordered:zeros",
         text);
  }
  std::string names;
  for (const Row& row : rows) names += fmt::format("{}{}", names.empty() ? "" : ", ", row.name);
  fail(Status::invalid_argument, "format is '{}': must be one of {}, or int4:GROUP", text, names);
}

FormatSpec resolved(const FormatSpec& spec) {
  FormatSpec result = spec;
  if (spec.format == Format::int4 && spec.group == 0) result.group = default_group;
  return result;
}

double bits_per_weight(const FormatSpec& spec) {
  if (spec.format == Format::int4) return 4 + (spec.zeros ? 20.0 : 16.0) / resolved(spec).group;
  const Row* const row = find_row(spec.format);
  if (row == nullptr) {
    fail(Status::invalid_argument, "bits_per_weight: format is {}: must be one of shunt::Format",
         to_string(spec));
  }
  return row->bits;
}

}  // namespace shunt
