// dense3: three bits a weight whose meaning leans on the weight before, an e4m3 scale for 32 of k
// and one f32 scale a matrix. dense3.hpp has the code book.
#include "format/dense3.hpp"

#include <algorithm>

#include "core/quantise.hpp"
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

typedef float Eight __attribute__((vector_size(32)));
typedef std::int32_t EightInts __attribute__((vector_size(32)));

// By the code before: the eight numbers that a code chooses from. Those that times `unit` are no
// f32 are too far from everything.
struct Sets {
  std::array<Eight, 8> of;
  explicit Sets(double unit = 0) {
    for (std::size_t w = 0; w < 64; ++w) {
      const float value = dense3_values[w];
      const bool fits = std::fabs(static_cast<double>(value)) * unit <= f32_max;
      of[w % 8][w / 8] = fits ? value : std::numeric_limits<float>::infinity();
    }
  }
};

struct Path {
  float error = 0;
  std::array<std::uint8_t, group> codes{};
};

// The codes of least squared error for y[0 .. count), of equal ones those with lower codes before.
Path best_path(const Sets& sets, const float* y, std::int64_t count) {
  std::array<EightInts, group> before;
  const Eight first = y[0] - sets.of[0];
  Eight cost = first * first;
  for (std::int64_t i = 1; i < count; ++i) {
    const Eight at_zero = y[i] - sets.of[0];
    Eight least = cost[0] + at_zero * at_zero;
    EightInts from{};
    for (int code = 1; code < 8; ++code) {
      const Eight distance = y[i] - sets.of[static_cast<std::size_t>(code)];
      const Eight here = cost[code] + distance * distance;
      const EightInts better = here < least;
      least = better ? here : least;
      from = better ? EightInts{} + code : from;
    }
    cost = least;
    before[static_cast<std::size_t>(i)] = from;
  }
  int code = 0;
  for (int c = 1; c < 8; ++c) {
    if (cost[c] < cost[code]) code = c;
  }
  Path path{.error = cost[code]};
  for (std::int64_t i = count - 1; i >= 0; --i) {
    path.codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(code);
    if (i > 0) code = before[static_cast<std::size_t>(i)][code];
  }
  return path;
}

// The scale is looked for around the root mean square: five that are three e4m3 codes apart, then
// the neighbours of the best.
void encode_group(const Sets& sets, const float* from, std::int64_t count, float global,
                  std::uint8_t* scale, std::uint8_t* to) {
  std::fill_n(to, dense3_group_bytes, std::uint8_t{0});
  double power = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    power += static_cast<double>(from[i]) * static_cast<double>(from[i]);
  }
  *scale = 0;
  if (power == 0) return;
  const int middle =
      to_e4m3(std::sqrt(power / static_cast<double>(count)), static_cast<double>(global));
  Path best;
  double least = power;  // what a scale of 0 loses
  const auto attempt = [&](int code) {
    if (code < e4m3_least || code > e4m3_most) return;
    const double unit = static_cast<double>(e4m3_to_f32(static_cast<std::uint8_t>(code))) *
                        static_cast<double>(global);
    std::array<float, group> y;
    for (std::int64_t i = 0; i < count; ++i) {
      y[static_cast<std::size_t>(i)] = static_cast<float>(static_cast<double>(from[i]) / unit);
    }
    const bool all_fit = static_cast<double>(dense3_most) * unit <= f32_max;
    const Path path = best_path(all_fit ? sets : Sets(unit), y.data(), count);
    const double error = static_cast<double>(path.error) * unit * unit;
    if (!(error < least)) return;
    least = error;
    best = path;
    *scale = static_cast<std::uint8_t>(code);
  };
  const int start = std::clamp<int>(middle, e4m3_least, e4m3_most);
  for (const int step : {0, -3, 3, -6, 6}) attempt(start + step);
  const int near = *scale;
  attempt(near - 1);
  attempt(near + 1);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t bit = 3 * i;
    const int code = best.codes[static_cast<std::size_t>(i)] << (bit % 8);
    to[bit / 8] = static_cast<std::uint8_t>(to[bit / 8] | code);
    if (bit % 8 > 5) to[bit / 8 + 1] = static_cast<std::uint8_t>(code >> 8);
  }
}

void encode(const RowBlock& rows, const PackedMatrix& to) {
  const Sets sets;
  const std::int64_t groups = groups_of(rows.k, group);
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const std::int64_t at = (rows.first + i) * groups;
    for_each_group(rows.k, group, [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
      encode_group(sets, rows.row(i) + begin, count, to.global_scale,
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
