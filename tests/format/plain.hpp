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
      // The numbers in hexadecimal bf16, as docs/formats.md lists them.
      static const int table[64] = {
          0xc02c, 0xbfe5, 0xc02b, 0xbff4, 0xc051, 0xbfea, 0xc023, 0xbff2, 0xbfc5, 0xbf76, 0xbfaf,
          0xbf57, 0xbfab, 0xbf63, 0xbfb4, 0xbf7f, 0xbf5e, 0xbedc, 0xbf4f, 0xbeb0, 0xbf48, 0xbec1,
          0xbf50, 0xbedb, 0xbebc, 0xbca1, 0xbec8, 0x3ca1, 0xbec1, 0x3c2e, 0xbeb9, 0x3bcc, 0x3d42,
          0x3ec0, 0xbc78, 0x3ebc, 0xbc96, 0x3ecb, 0x3d09, 0x3edb, 0x3efa, 0x3f53, 0x3ec4, 0x3f40,
          0x3eb0, 0x3f4d, 0x3ee3, 0x3f6a, 0x3f88, 0x3fb7, 0x3f6a, 0x3fab, 0x3f5c, 0x3fb0, 0x3f7c,
          0x3fc8, 0x4001, 0x4028, 0x3fee, 0x4052, 0x3fec, 0x4029, 0x3fe7, 0x4030};
      const std::int64_t first = (n * cut(32) + k / 32) * 12, bit = 3 * (k % 32);
      const auto one = [&](std::int64_t b) {
        return b < 0 ? 0 : byte(m.values, first + b / 8) >> (b % 8) & 1;
      };
      int window = 0;
      for (int i = 0; i < 6; ++i) window |= one(bit - 3 + i) << i;
      const auto bits = static_cast<std::uint16_t>(table[window]);
      return plain_float(view(&bits, DType::bf16, {1}), 0) *
             plain_e4m3(byte(m.scales, n * cut(32) + k / 32)) * global;
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

// Memory of a packed matrix and of the values it is made from.
struct Packed {
  std::vector<float> matrix;
  std::vector<std::uint64_t> memory;
  PackedMatrix packed;

  static Packed of(const FormatSpec& spec, std::vector<float> values, std::int64_t n,
                   std::int64_t k, float global_amax = 0) {
    Packed p;
    p.matrix = std::move(values);
    p.memory.resize(packed_bytes(spec, n, k) / 8 + 8);
    auto at = reinterpret_cast<std::uintptr_t>(p.memory.data());
    at = (at + 63) / 64 * 64;
    p.packed = pack(spec, view(p.matrix.data(), {n, k}),
                    {reinterpret_cast<void*>(at), packed_bytes(spec, n, k)}, global_amax);
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
