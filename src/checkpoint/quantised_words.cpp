// Linear layers of GPTQ and AWQ: words of eight codes, the transpose of what a PackedMatrix has.
#include <algorithm>
#include <array>

#include "checkpoint/quantised.hpp"
#include "checkpoint/quantised_tensors.hpp"
#include "core/check.hpp"
#include "core/shape.hpp"

namespace shunt {

namespace {

// to[c, r] = from[r, c] of 32-bit words, in tiles that stay in the L1.
void transpose_words(const std::uint32_t* from, std::int64_t rows, std::int64_t columns,
                     std::uint32_t* to) {
  constexpr std::int64_t tile = 16;
  for (std::int64_t c0 = 0; c0 < columns; c0 += tile) {
    for (std::int64_t r0 = 0; r0 < rows; r0 += tile) {
      for (std::int64_t c = c0; c < std::min(c0 + tile, columns); ++c) {
        for (std::int64_t r = r0; r < std::min(r0 + tile, rows); ++r) {
          to[c * rows + r] = from[r * columns + c];
        }
      }
    }
  }
}

// Which nibble of a word AWQ keeps column c of eight in.
constexpr std::array<int, 8> awq_nibble = {0, 4, 1, 5, 2, 6, 3, 7};

// The dense transpose of a matrix of 16-bit or 32-bit elements.
template <class T>
void transpose(const Tensor& from, T* to) {
  for (std::int64_t r = 0; r < from.shape[0]; ++r) {
    for (std::int64_t c = 0; c < from.shape[1]; ++c) {
      to[c * from.shape[0] + r] = from.as<const T>()[r * from.shape[1] + c];
    }
  }
}

}  // namespace

Tensor QuantisedReader::scales_by_groups(const std::string& scales, const std::string& values,
                                         std::int64_t n) const {
  if (!store_.contains(scales)) mismatch(scales, "the scales of " + values);
  const Tensor s = tensor(scales);
  if (!plain(s.dtype) || s.rank != 2 || s.shape[1] != n) {
    mismatch(scales, fmt::format("f16, bf16 or f32 [groups, {}]", n));
  }
  return s;
}

Tensor QuantisedReader::transposed_scales(const Tensor& scales) const {
  void* const to = repacking_.take(static_cast<std::size_t>(scales.bytes()));
  repacking_.later([scales, to] {
    scales.dtype == DType::f32 ? transpose(scales, static_cast<std::uint32_t*>(to))
                               : transpose(scales, static_cast<std::uint16_t*>(to));
  });
  return view(to, scales.dtype, {scales.shape[1], scales.shape[0]});
}

Tensor QuantisedReader::packed_zeros(const std::string& name, std::int64_t groups,
                                     std::int64_t n) const {
  const Tensor packed = tensor(name);
  if (packed.dtype != DType::i32 || !has_shape(packed, {groups, n / 8})) {
    mismatch(name, fmt::format("i32 [{}, {}]", groups, n / 8));
  }
  return packed;
}

// qweight i32 [k / 8, n], eight k to a word; scales [groups, n]; qzeros i32 [groups, n / 8]; g_idx.
PackedMatrix QuantisedReader::gptq(const std::string& base, std::int64_t n, std::int64_t k) const {
  refuse_extras(base, {});
  const std::string values = base + ".qweight", scales = base + ".scales", zeros = base + ".qzeros";
  const Tensor words = tensor(values);
  if (k % 8 != 0 || n % 8 != 0 || words.dtype != DType::i32 || !has_shape(words, {k / 8, n})) {
    mismatch(values, fmt::format("i32 [{}, {}], both sizes multiples of 8", k / 8, n));
  }
  const Tensor s = scales_by_groups(scales, values, n);
  const std::int64_t groups = s.shape[0];
  PackedMatrix m{.format = int4(base, scales, k, groups)};
  m.group_of = order(base + ".g_idx", k, m.format.group, groups);
  auto* const to =
      static_cast<std::uint32_t*>(repacking_.take(static_cast<std::size_t>(n * k / 2)));
  m.values = view(to, DType::u8, {n, k / 2});
  repacking_.later(
      [words, to, n, k] { transpose_words(words.as<const std::uint32_t>(), k / 8, n, to); });
  m.scales = transposed_scales(s);
  if (!store_.contains(zeros)) return m;
  const Tensor packed = packed_zeros(zeros, groups, n);
  if (all_words(packed, config_.next_zero ? 0x77777777U : 0x88888888U)) return m;
  const auto* const from = packed.as<const std::uint32_t>();
  auto* const z = static_cast<std::uint8_t*>(repacking_.take(static_cast<std::size_t>(n * groups)));
  m.zeros = view(z, DType::u8, {n, groups});
  const int next = config_.next_zero ? 1 : 0;
  repacking_.later([from, z, n, groups, next] {
    for (std::int64_t row = 0; row < n; ++row) {
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::uint32_t word = from[g * n / 8 + row / 8];
        z[row * groups + g] = static_cast<std::uint8_t>((word >> (row % 8 * 4) & 15) +
                                                        static_cast<std::uint32_t>(next));
      }
    }
  });
  return m;
}

// qweight i32 [k, n / 8], eight n to a word in AWQ's order; scales [groups, n]; qzeros i32 [groups,
// n / 8] in the same order.
PackedMatrix QuantisedReader::awq(const std::string& base, std::int64_t n, std::int64_t k) const {
  refuse_extras(base, {".g_idx"});
  const std::string values = base + ".qweight", scales = base + ".scales", zeros = base + ".qzeros";
  const Tensor words = tensor(values);
  if (n % 8 != 0 || words.dtype != DType::i32 || !has_shape(words, {k, n / 8})) {
    mismatch(values, fmt::format("i32 [{}, {}], {} a multiple of 8", k, n / 8, n));
  }
  const Tensor s = scales_by_groups(scales, values, n);
  const std::int64_t groups = s.shape[0];
  PackedMatrix m{.format = int4(base, scales, k, groups)};
  const std::int64_t row_bytes = groups_of(k, 2);
  auto* const to =
      static_cast<std::uint8_t*>(repacking_.take(static_cast<std::size_t>(n * row_bytes)));
  m.values = view(to, DType::u8, {n, row_bytes});
  repacking_.later([words, to, n, k, row_bytes] {
    const auto* const from = words.as<const std::uint32_t>();
    // Tiles of 128 k by 8 n: as many lines are written as stay in the L1.
    for (std::int64_t k0 = 0; k0 < k; k0 += 128) {
      for (std::int64_t block = 0; block < n / 8; ++block) {
        for (std::int64_t i = k0; i < std::min(k0 + 128, k); ++i) {
          const std::uint32_t word = from[i * (n / 8) + block];
          for (std::int64_t c = 0; c < 8; ++c) {
            const auto code = static_cast<std::uint8_t>(
                word >> (4 * awq_nibble[static_cast<std::size_t>(c)]) & 15);
            std::uint8_t& byte = to[(block * 8 + c) * row_bytes + i / 2];
            byte = static_cast<std::uint8_t>(i % 2 == 0 ? code : byte | code << 4);
          }
        }
      }
    }
  });
  m.scales = transposed_scales(s);
  if (!store_.contains(zeros)) return m;
  const Tensor packed = packed_zeros(zeros, groups, n);
  if (all_words(packed, 0x88888888U)) return m;
  auto* const z = static_cast<std::uint8_t*>(repacking_.take(static_cast<std::size_t>(n * groups)));
  m.zeros = view(z, DType::u8, {n, groups});
  repacking_.later([packed, z, n, groups] {
    for (std::int64_t row = 0; row < n; ++row) {
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::uint32_t word = packed.as<const std::uint32_t>()[g * (n / 8) + row / 8];
        const int shift = 4 * awq_nibble[static_cast<std::size_t>(row % 8)];
        z[row * groups + g] = static_cast<std::uint8_t>(word >> shift & 15);
      }
    }
  });
  return m;
}

}  // namespace shunt
