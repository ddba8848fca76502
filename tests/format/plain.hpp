// Decoders of every format, written from the words of format.hpp in plain doubles: what the
// library's own are tested against.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "shunt/format.hpp"

namespace shunt {

inline double plain_e2m1(int code) {
  const int exponent = code >> 1 & 3, mantissa = code & 1;
  const double m = exponent == 0 ? mantissa * 0.5 : std::ldexp(1 + mantissa * 0.5, exponent - 1);
  return (code & 8) != 0 ? -m : m;
}

inline double plain_e4m3(int code) {
  if ((code & 0x7f) == 0x7f) return std::nan("");
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double m =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -m : m;
}

inline double plain_e8m0(int code) {
  return code == 255 ? std::nan("") : std::ldexp(1.0, code - 127);
}

inline double plain_float(const Tensor& t, std::int64_t i) {
  if (t.dtype == DType::f32) return static_cast<double>(t.as<float>()[i]);
  const int bits = t.as<std::uint16_t>()[i];
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = t.dtype == DType::bf16 ? bits >> 7 & 255 : bits >> 10 & 31;
  const int mantissa = t.dtype == DType::bf16 ? bits & 127 : bits & 1023;
  const int width = t.dtype == DType::bf16 ? 7 : 10, bias = t.dtype == DType::bf16 ? 127 : 15;
  if (exponent == (t.dtype == DType::bf16 ? 255 : 31)) {
    return mantissa == 0 ? sign * HUGE_VAL : std::nan("");
  }
  return sign * std::ldexp(exponent == 0 ? mantissa : mantissa + (1 << width),
                           std::max(exponent, 1) - bias - width);
}

inline int byte(const Tensor& t, std::int64_t i) { return t.as<std::uint8_t>()[i]; }

// w[n, k].
inline double plain_weight(const PackedMatrix& m, std::int64_t n, std::int64_t k) {
  const auto global = static_cast<double>(m.global_scale);
  const auto cut = [&](std::int64_t group) { return (m.k + group - 1) / group; };
  const auto e2m1 = [&] {
    const int pair = byte(m.values, n * cut(2) + k / 2);
    return plain_e2m1(k % 2 == 0 ? pair & 15 : pair >> 4);
  };
  switch (m.format.format) {
    case Format::fp8_tensor:
      return plain_e4m3(byte(m.values, n * m.k + k)) * global;
    case Format::fp8_channel:
      return plain_e4m3(byte(m.values, n * m.k + k)) * plain_float(m.scales, n);
    case Format::fp8_block:
      return plain_e4m3(byte(m.values, n * m.k + k)) *
             plain_float(m.scales, n / 128 * cut(128) + k / 128);
    case Format::mxfp8:
      return plain_e4m3(byte(m.values, n * m.k + k)) *
             plain_e8m0(byte(m.scales, n * cut(32) + k / 32));
    case Format::nvfp4:
      return e2m1() * plain_e4m3(byte(m.scales, n * cut(16) + k / 16)) * global;
    case Format::mxfp4:
      return e2m1() * plain_e8m0(byte(m.scales, n * cut(32) + k / 32));
    case Format::int8:
      return m.values.as<std::int8_t>()[n * m.k + k] * plain_float(m.scales, n);
    case Format::int4: {
      const int pair = byte(m.values, n * cut(2) + k / 2);
      const std::int64_t group = m.group_of ? m.group_of.as<std::int32_t>()[k] : k / m.format.group;
      const std::int64_t at = n * cut(m.format.group) + group;
      const int zero = m.zeros ? byte(m.zeros, at) : 8;
      return ((k % 2 == 0 ? pair & 15 : pair >> 4) - zero) * plain_float(m.scales, at);
    }
    case Format::dense3: {
      // The numbers times 32, as docs/formats.md lists them.
      static const int table[64] = {
          -86, -57, -86, -61, -105, -59, -82, -61, -49, -31, -44, -27, -43, -28, -45, -32,
          -28, -14, -26, -11, -25,  -12, -26, -14, -12, -1,  -13, 1,   -12, 0,   -12, 0,
          2,   12,  0,   12,  -1,   13,  1,   14,  16,  26,  12,  24,  11,  26,  14,  29,
          34,  46,  29,  43,  28,   44,  32,  50,  64,  84,  60,  106, 59,  85,  58,  87};
      const std::int64_t first = (n * cut(32) + k / 32) * 12, bit = 3 * (k % 32);
      const auto one = [&](std::int64_t b) {
        return b < 0 ? 0 : byte(m.values, first + b / 8) >> (b % 8) & 1;
      };
      int window = 0;
      for (int i = 0; i < 6; ++i) window |= one(bit - 3 + i) << i;
      return table[window] / 32.0 * plain_e4m3(byte(m.scales, n * cut(32) + k / 32)) * global;
    }
    case Format::sparse_nvfp4: {
      const int place = byte(m.positions, n * cut(8) + k / 8) >> (k % 8 < 4 ? 0 : 4) & 15;
      const int pair = byte(m.values, n * cut(4) + k / 4);
      const double scale = plain_e4m3(byte(m.scales, n * cut(16) + k / 16)) * global;
      if ((place & 3) == k % 4) return plain_e2m1(pair & 15) * scale;
      if (place >> 2 == k % 4) return plain_e2m1(pair >> 4) * scale;
      return 0;
    }
    default:
      return std::nan("");
  }
}

// Those of a checkpoint's matrices, int4 in groups of several sizes and with zero points.
inline std::vector<FormatSpec> every_format() {
  std::vector<FormatSpec> list = known_formats();
  for (const int group : {16, 64, 128}) list.push_back({Format::int4, group});
  list.push_back({.format = Format::int4, .group = 32, .zeros = true});
  return list;
}

// Memory of a packed matrix and of the values it is made from.
struct Packed {
  std::vector<float> matrix;
  std::vector<std::uint64_t> memory;
  std::vector<std::uint8_t> zeros;
  PackedMatrix packed;

  // With zeros: as without, then zero points at random.
  static Packed of(const FormatSpec& prepared, std::vector<float> values, std::int64_t n,
                   std::int64_t k, float global_amax = 0) {
    Packed p;
    const FormatSpec spec = prepared.of_matrix();
    p.matrix = std::move(values);
    p.memory.resize(packed_bytes(spec, n, k) / 8 + 8);
    auto at = reinterpret_cast<std::uintptr_t>(p.memory.data());
    at = (at + 63) / 64 * 64;
    p.packed = pack(spec, view(p.matrix.data(), {n, k}),
                    {reinterpret_cast<void*>(at), packed_bytes(spec, n, k)}, global_amax);
    if (prepared.zeros) {
      std::mt19937 random(static_cast<unsigned>(n + k));
      p.zeros.resize(static_cast<std::size_t>(p.packed.scales.elements()));
      for (std::uint8_t& zero : p.zeros) zero = static_cast<std::uint8_t>(random() % 16);
      if (!p.zeros.empty()) p.zeros[0] = 3;  // one that is not 8
      p.packed.zeros =
          view(static_cast<const void*>(p.zeros.data()), DType::u8, {n, p.packed.scales.shape[1]});
    }
    return p;
  }
  std::vector<float> values() const {
    std::vector<float> out(static_cast<std::size_t>(packed.n * packed.k));
    unpack(packed, view(out.data(), {packed.n, packed.k}));
    return out;
  }
};

inline std::vector<float> normal_values(std::int64_t count, unsigned seed,
                                        float deviation = 0.02F) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = normal(random);
  return values;
}

}  // namespace shunt
