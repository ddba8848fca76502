// dense3: three bits a weight whose meaning leans on the weight before, an e4m3 scale for 32 of k
// and one f32 scale a matrix. dense3.hpp has the code book.
#include "format/dense3.hpp"

#include <algorithm>

#include "core/quantise.hpp"
#include "cpu/features.hpp"
#include "format/dense3_search.hpp"
#include "format/rules.hpp"

namespace shunt {
namespace {

constexpr std::int64_t group = dense3_group;
constexpr std::uint8_t e4m3_least = 0x01, e4m3_most = 0x7e;

PackedMatrix tensors(const FormatSpec&, std::int64_t n, std::int64_t k) {
  return {.values = without_data(DType::u8, {n, groups_of(k, group) * dense3_group_bytes}),
          .scales = without_data(DType::f8_e4m3, {n, groups_of(k, group)})};
}

// A group's scale is about its root mean square, which is never more than the largest magnitude.
float global_scale(float amax) { return scale_for(amax, e4m3_max); }

// The sets for this unit: numbers that times it are no f32 are too far from everything.
cpu_engine::Dense3Sets sets_for(double unit) {
  cpu_engine::Dense3Sets sets;
  for (std::size_t w = 0; w < 64; ++w) {
    const float value = dense3_values[w];
    const bool fits = std::fabs(static_cast<double>(value)) * unit <= f32_max;
    sets.of[w % 8][w / 8] = fits ? value : std::numeric_limits<float>::infinity();
  }
  return sets;
}

// Of equal ends, the lowest.
int cheapest(const cpu_engine::Dense3Costs& costs) {
  return static_cast<int>(std::min_element(costs.last, costs.last + 8) - costs.last);
}

struct Search {
  cpu_engine::Dense3Search run;
  cpu_engine::Dense3Sets sets;
};

// What a number can be of either sign, whatever the code before.
constexpr double reach = [] {
  double least = 64;
  for (std::size_t before = 0; before < 8; ++before) {
    double above = 0, below = 0;
    for (std::size_t code = 0; code < 8; ++code) {
      const auto value = static_cast<double>(dense3_values[8 * code + before]);
      above = std::max(above, value), below = std::max(below, -value);
    }
    least = std::min({least, above, below});
  }
  return least;
}();

// The scale is looked for around the root mean square: five that are three e4m3 codes apart, and
// one beyond these where it takes that to reach the largest weight; then the neighbours of the
// best.
void encode_group(const Search& search, const float* from, std::int64_t count, float global,
                  std::uint8_t* scale, std::uint8_t* to) {
  std::fill_n(to, dense3_group_bytes, std::uint8_t{0});
  double power = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    power += static_cast<double>(from[i]) * static_cast<double>(from[i]);
  }
  *scale = 0;
  if (power == 0) return;
  const auto middle =
      to_e4m3(std::sqrt(power / static_cast<double>(count)), static_cast<double>(global));
  double least = power;  // what a scale of 0 loses
  std::array<std::uint8_t, group> codes{};
  const auto attempt = [&](std::initializer_list<int> scales) {
    std::array<std::uint8_t, cpu_engine::most_dense3_units> legal;
    std::array<double, cpu_engine::most_dense3_units> units;
    std::size_t many = 0;
    bool all_fit = true;
    for (const int code : scales) {
      if (code < e4m3_least || code > e4m3_most) continue;
      legal[many] = static_cast<std::uint8_t>(code);
      units[many] = static_cast<double>(e4m3_to_f32(legal[many])) * static_cast<double>(global);
      all_fit = all_fit && static_cast<double>(dense3_most) * units[many] <= f32_max;
      ++many;
    }
    std::array<cpu_engine::Dense3Costs, cpu_engine::most_dense3_units> costs;
    if (all_fit) {
      search.run(search.sets, from, static_cast<int>(count), units.data(), static_cast<int>(many),
                 costs.data());
    } else {
      for (std::size_t u = 0; u < many; ++u) {
        std::array<cpu_engine::Dense3Costs, cpu_engine::most_dense3_units> own;
        search.run(sets_for(units[u]), from, static_cast<int>(count), &units[u], 1, own.data());
        costs[u] = own[0];
      }
    }
    for (std::size_t u = 0; u < many; ++u) {
      int code = cheapest(costs[u]);
      const double error = static_cast<double>(costs[u].last[code]) * units[u] * units[u];
      if (!(error < least)) continue;
      least = error;
      *scale = legal[u];
      for (std::int64_t i = count - 1; i >= 0; --i) {
        codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(code);
        if (i > 0) code = costs[u].before[i][code];
      }
    }
  };
  const int start = std::clamp<int>(middle, e4m3_least, e4m3_most);
  const int reaching =
      to_e4m3(static_cast<double>(largest(from, count)) / reach, static_cast<double>(global));
  attempt({start, start - 3, start + 3, start - 6, start + 6, reaching > start + 6 ? reaching : 0});
  const int near = *scale;
  attempt({near - 1, near + 1});
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t bit = 3 * i;
    const int code = codes[static_cast<std::size_t>(i)] << (bit % 8);
    to[bit / 8] = static_cast<std::uint8_t>(to[bit / 8] | code);
    if (bit % 8 > 5) to[bit / 8 + 1] = static_cast<std::uint8_t>(code >> 8);
  }
}

void encode(const RowBlock& rows, const PackedMatrix& to) {
  // The same bytes in each set; SHUNT_ISA is looked at once.
  static const Search search{cpu_engine::dense3_search(cpu_engine::selected_isa()), sets_for(0)};
  const std::int64_t groups = groups_of(rows.k, group);
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const std::int64_t at = (rows.first + i) * groups;
    for_each_group(rows.k, group, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
      encode_group(search, rows.row(i) + begin, count, to.global_scale,
                   to.scales.as<std::uint8_t>() + at + g,
                   to.values.as<std::uint8_t>() + (at + g) * dense3_group_bytes);
    });
  }
}

void decode(const PackedMatrix& from, std::int64_t row, double* to) {
  const std::int64_t at = row * groups_of(from.k, group);
  for_each_group(from.k, group, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
    const double scale = static_cast<double>(e4m3_to_f32(from.scales.as<std::uint8_t>()[at + g])) *
                         static_cast<double>(from.global_scale);
    const std::uint8_t* const codes =
        from.values.as<std::uint8_t>() + (at + g) * dense3_group_bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      to[begin + i] =
          static_cast<double>(dense3_values[static_cast<std::size_t>(dense3_window(codes, i))]) *
          scale;
    }
  });
}

}  // namespace

const FormatRules dense3_rules = {{Format::dense3}, tensors, global_scale, encode, decode};

}  // namespace shunt
