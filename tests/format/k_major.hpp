// Tensors of the k-major layout of sparse FP4 (shunt/sparse.hpp), with room, for tests.
#pragma once

#include <cstdint>
#include <vector>

#include "format/plain.hpp"
#include "shunt/sparse.hpp"

namespace shunt {

struct KMajor {
  std::int64_t n, k;
  std::vector<std::uint8_t> comp, meta, scale;
  KMajorSparse views;
  KMajor(std::int64_t n_, std::int64_t k_)
      : n(n_),
        k(k_),
        comp(static_cast<std::size_t>(n * k / 4)),
        meta(static_cast<std::size_t>(n * k / 8)),
        scale(static_cast<std::size_t>(n * k / 16)) {
    views.comp = view(comp.data(), DType::u8, {k / 4, n});
    views.meta = view(meta.data(), DType::u8, {k / 8, n});
    views.scale = view(scale.data(), DType::u8, {k / 16, n});
  }
  KMajor(const KMajor&) = delete;
  KMajor& operator=(const KMajor&) = delete;

  // Column `row` of the layout times x: with(w, k of it) for each number that is kept, as the
  // kernels of that layout go through it.
  template <class With>
  void each(std::int64_t row, const With& with) const {
    const auto at = [&](const std::vector<std::uint8_t>& bytes, std::int64_t r) {
      return static_cast<int>(bytes[static_cast<std::size_t>(r * n + row)]);
    };
    for (std::int64_t group = 0; group < k / 4; ++group) {
      const int places = at(meta, group / 2) >> (group % 2 == 0 ? 0 : 4), pair = at(comp, group);
      const double by = plain_e4m3(at(scale, group / 4)) * static_cast<double>(views.global_scale);
      with(plain_e2m1(pair & 15) * by, group * 4 + (places & 3));
      with(plain_e2m1(pair >> 4) * by, group * 4 + (places >> 2 & 3));
    }
  }
};

}  // namespace shunt
