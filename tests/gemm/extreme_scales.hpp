// Scales at the ends of what their types hold, in place of those of a packed matrix, for tests of
// products: subnormal ones, zeros, the largest, those of which little is left beside others.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/convert.hpp"
#include "gemm/gemm_data.hpp"
#include "shunt/format.hpp"

namespace shunt::test {

struct ExtremeScales {
  std::string name;
  float global = 1;  // of formats that have one
  // Of a row (or a block of rows) and a group of k: a code of e4m3 or e8m0, or a number.
  std::function<int(std::int64_t, std::int64_t)> code{};
  std::function<float(std::int64_t, std::int64_t)> number{};
  DType type = DType::bf16;   // of int4's
  int rows = 0;               // what meets them are numbers of about 2^rows ..
  std::int64_t zeros = 0;     // .. but so many zeros first
  bool not_on_a_gpu = false;  // where such scales are refused
};

inline std::vector<ExtremeScales> extreme_e4m3(bool with_sign) {
  using I = std::int64_t;
  const auto every = [](I row, I group) { return static_cast<int>((row * 37 + group * 11) % 127); };
  std::vector<ExtremeScales> list = {
      {.name = "subnormal",
       .global = 0.3F,
       .code = [](I row, I group) { return static_cast<int>(1 + (row + group) % 7); }},
      {.name = "blocks of zeros",
       .global = 0.3F,
       .code =
           [](I row, I group) {
             return row % 5 == 4 || group % 3 == 1 ? 0 : static_cast<int>(0x38 + row % 8);
           }},
      {.name = "the largest", .global = 0.3F, .code = [](I, I) { return 0x7e; }},
      {.name = "every code", .global = 0.3F, .code = every},
      // Times the least e4m3 no f32 that is normal.
      {.name = "under a global scale next to the least",
       .global = 0x1p-126F,
       .code = every,
       .rows = 10},
      {.name = "under a small global scale", .global = 0x1.b6p-110F, .code = every},
      {.name = "under a large global scale", .global = 0x1.4cp100F, .code = every},
      {.name = "under a negative global scale", .global = -0.3F, .code = every}};
  list.push_back(
      {.name = "negative",
       .global = 0.3F,
       .code = [every](I row, I group) { return every(row, group) | (row + group) % 2 * 0x80; },
       .not_on_a_gpu = !with_sign});
  return list;
}

// `codes_to`: log2 of the largest code, rounded up. Rows are of `dtype`.
inline std::vector<ExtremeScales> extreme_e8m0(int codes_to, DType dtype) {
  using I = std::int64_t;
  // 512 products of a code, a scale and a number below 8 stay finite.
  const int highest = 127 + 127 - codes_to - 3 - 9;
  const int apart = dtype == DType::f16 ? 20 : 100;  // gemm.hpp: 2^22 and 2^120
  const int down = dtype == DType::f16 ? -20 : -40;
  return {{.name = "the least",
           .code = [](I row, I group) { return static_cast<int>(row % 2 == 0 ? 0 : group % 3); }},
          {.name = "the largest of finite results",
           .code = [highest](I row, I) { return highest - static_cast<int>(row % 3); }},
          {.name = "the largest",
           .code = [](I row, I) { return 254 - static_cast<int>(row % 3); },
           .rows = down},
          {.name = "rows far apart",
           .code = [highest](I row,
                             I group) { return static_cast<int>(row * 7 % highest + group % 2); }},
          // The largest meets zeros.
          {.name = "blocks far apart",
           .code =
               [apart](I, I group) {
                 return group == 0 ? 180 : static_cast<int>(180 - apart + group % 2);
               },
           .zeros = 32}};
}

inline std::vector<ExtremeScales> extreme_f32() {
  using I = std::int64_t;
  return {{.name = "small",
           .number =
               [](I row, I group) {
                 return std::ldexp(1.3F, static_cast<int>(-125 + (row + group) % 3));
               }},
          {.name = "large",
           .number =
               [](I row, I group) {
                 return std::ldexp(1.7F, static_cast<int>(96 - (row + group) % 3));
               }},
          {.name = "zero and negative", .number = [](I row, I group) {
             return (row + group) % 3 == 0 ? 0 : (row + group) % 3 == 1 ? 0.7F : -1.1F;
           }}};
}
// A row's own.
inline std::vector<ExtremeScales> extreme_f32_of_rows() {
  using I = std::int64_t;
  std::vector<ExtremeScales> list = extreme_f32();
  list.push_back({.name = "rows far apart", .number = [](I row, I) {
                    return std::ldexp(1.3F, static_cast<int>(row * 29 % 220) - 125);
                  }});
  return list;
}

inline std::vector<ExtremeScales> extreme_int4(int group) {
  using I = std::int64_t;
  const auto small = [](I row, I g) {
    return std::ldexp(1.25F, static_cast<int>(-120 + (row + g) % 4));
  };
  // The largest meets zeros.
  const auto far = [](I, I g) {
    const float sign = g % 2 == 0 ? 1.0F : -1.0F;
    if (g % 5 == 3) return 0.0F;
    return g == 0 ? 1024.0F : sign * std::ldexp(1.5F, -10 - static_cast<int>(g % 3));
  };
  return {
      {.name = "small", .number = small},
      {.name = "small, as f32", .number = small, .type = DType::f32},
      {.name = "large",
       .number = [](I row,
                    I g) { return std::ldexp(1.75F, static_cast<int>(105 - (row + g) % 4)); }},
      {.name = "far apart, with zeros and signs", .number = far, .zeros = group},
      {.name = "subnormal f16",
       .number = [](I row, I g) { return std::ldexp(static_cast<float>(1 + (row + g) % 9), -24); },
       .type = DType::f16},
      {.name = "the largest f16",
       .number = [](I row, I g) { return (row + g) % 3 == 0 ? 65504.0F : 1.0F; },
       .type = DType::f16}};
}

// Rows of the matrix's product are of `dtype`.
inline std::vector<ExtremeScales> extreme_scales(const FormatSpec& format, DType dtype) {
  switch (format.format) {
    case Format::fp8_tensor:
      return {{.name = "small", .global = 0x1.3p-126F},
              {.name = "large", .global = 0x1.bp96F},
              {.name = "negative", .global = -0.7F}};
    case Format::fp8_channel:
    case Format::int8:
      return extreme_f32_of_rows();
    case Format::fp8_block:
      return extreme_f32();
    case Format::mxfp8:
      return extreme_e8m0(9, dtype);
    case Format::mxfp4:
      return extreme_e8m0(3, dtype);
    case Format::int4:
      return extreme_int4(format.group);
    case Format::dense3:
      return extreme_e4m3(false);
    default:
      return extreme_e4m3(true);
  }
}

// `matrix` with these scales, over its own, or where int4's are of another type in `memory`.
inline PackedMatrix with_scales(PackedMatrix matrix, const ExtremeScales& extreme,
                                std::vector<std::uint32_t>& memory) {
  matrix.global_scale = extreme.global;
  Tensor& scales = matrix.scales;
  if (!scales) return matrix;
  const std::int64_t rows = scales.shape[0], groups = scales.rank == 2 ? scales.shape[1] : 1;
  if (matrix.format.format == Format::int4) {
    memory.assign(static_cast<std::size_t>(rows * groups), 0);
    scales = view(static_cast<const void*>(memory.data()), extreme.type, {rows, groups});
  }
  for (std::int64_t i = 0; i < rows * groups; ++i) {
    const std::int64_t row = i / groups, group = i % groups;
    if (extreme.code) {
      scales.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(extreme.code(row, group));
    } else {
      store_f32(scales.data, scales.dtype, i, extreme.number(row, group));
    }
  }
  return matrix;
}

// Rows [rows, k] that are to meet them.
inline Array rows_for(const ExtremeScales& extreme, DType dtype, std::int64_t rows, std::int64_t k,
                      unsigned seed) {
  Array x = random_array(DType::f32, {rows, k}, seed), rounded(dtype, {rows, k});
  for (std::int64_t i = 0; i < rows * k; ++i) {
    rounded.set(i, i % k < extreme.zeros ? 0 : std::ldexp(x.get(i), extreme.rows));
  }
  return rounded;
}

// Of a sum of k products in f32, as sum_bound(), where that may be next to the least numbers: each
// step then rounds to 2^-149, by kernels that keep sums 2^-8 of what they are, to 2^-141.
inline double tiny_sum_bound(std::int64_t k, double magnitude) {
  const auto steps = static_cast<double>(k + 6);
  return 2 * steps * (0x1p-24 * magnitude + 0x1p-142);
}

}  // namespace shunt::test
