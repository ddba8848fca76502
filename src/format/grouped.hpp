// Formats whose row is codes, and a byte of scale for each group of k. What differs is a Rule:
//   stored                       dtype of `values`
//   put(codes, k, value, scale)  writes the code of a value
//   value(codes, k)              what a code stands for, before its scale
//   per_byte                     codes in a byte
//   stored_scale                 dtype of `scales`
//   group                        how many of k share a scale
//   scale_byte(m, values, count) the byte for a group of the matrix m
//   scale(m, byte)               what it stands for, with the matrix's own scale
#pragma once

#include <cstdint>

#include "format/rules.hpp"

namespace shunt {

struct E2m1Codes {
  static constexpr DType stored = DType::u8;
  static constexpr std::int64_t per_byte = 2;
  static void put(std::uint8_t* codes, std::int64_t k, double value, double scale) {
    put_nibble(codes, k, to_e2m1(value, scale));
  }
  static double value(const std::uint8_t* codes, std::int64_t k) {
    return static_cast<double>(e2m1_values[nibble(codes, k)]);
  }
};
struct E4m3Codes {
  static constexpr DType stored = DType::f8_e4m3;
  static constexpr std::int64_t per_byte = 1;
  static void put(std::uint8_t* codes, std::int64_t k, double value, double scale) {
    codes[k] = to_e4m3(value, scale);
  }
  static double value(const std::uint8_t* codes, std::int64_t k) {
    return static_cast<double>(e4m3_to_f32(codes[k]));
  }
};

// OCP's MX: a power of two for 32 of k, by the exponent of the largest code.
template <int most_exponent>
struct MxScales {
  static constexpr DType stored_scale = DType::f8_e8m0;
  static constexpr std::int64_t group = 32;
  static std::uint8_t scale_byte(const PackedMatrix&, const float* values, std::int64_t count) {
    return mx_scale(largest(values, count), most_exponent);
  }
  static double scale(const PackedMatrix&, std::uint8_t byte) { return e8m0_to_f64(byte); }
};

// The three functions of FormatRules.
template <class Rule>
struct Grouped {
  static PackedMatrix tensors(const FormatSpec&, std::int64_t n, std::int64_t k) {
    return {.values = without_data(Rule::stored, {n, groups_of(k, Rule::per_byte)}),
            .scales = without_data(Rule::stored_scale, {n, groups_of(k, Rule::group)})};
  }
  static std::uint8_t* codes(const PackedMatrix& m, std::int64_t row) {
    return m.values.as<std::uint8_t>() + row * groups_of(m.k, Rule::per_byte);
  }
  static std::uint8_t* scales(const PackedMatrix& m, std::int64_t row) {
    return m.scales.as<std::uint8_t>() + row * groups_of(m.k, Rule::group);
  }
  static void encode(const RowBlock& rows, const PackedMatrix& to) {
    for (std::int64_t i = 0; i < rows.count; ++i) {
      const float* const from = rows.row(i);
      std::uint8_t* const bytes = scales(to, rows.first + i);
      std::uint8_t* const row = codes(to, rows.first + i);
      for_each_group(to.k, Rule::group,
                     [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
                       bytes[g] = Rule::scale_byte(to, from + begin, count);
                       const double scale = Rule::scale(to, bytes[g]);
                       for (std::int64_t k = begin; k < begin + count; ++k) {
                         Rule::put(row, k, static_cast<double>(from[k]), scale);
                       }
                     });
    }
  }
  static void decode(const PackedMatrix& from, std::int64_t number, double* to) {
    const std::uint8_t* const bytes = scales(from, number);
    const std::uint8_t* const row = codes(from, number);
    for_each_group(from.k, Rule::group,
                   [&](std::int64_t g, std::int64_t begin, std::int64_t count) {
                     const double scale = Rule::scale(from, bytes[g]);
                     for (std::int64_t k = begin; k < begin + count; ++k)
                       to[k] = Rule::value(row, k) * scale;
                   });
  }
};

}  // namespace shunt
