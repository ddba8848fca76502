// A matrix in NVFP4, dense or sparse, of the same numbers everywhere.
#pragma once

#include <cstdint>
#include <vector>

#include "format/pairs.hpp"
#include "shunt/context.hpp"
#include "shunt/format.hpp"

namespace shunt::test {

struct Fp4Matrix {
  std::vector<float> exact;  // [n, k], what `packed` stands for
  Buffer memory;
  PackedMatrix packed;
  // `pairs`: a scale for 32, and of sparse_nvfp4 one pair of every two.
  Fp4Matrix(std::int64_t n, std::int64_t k, unsigned seed, Format format = Format::nvfp4,
            bool pairs = false)
      : exact(static_cast<std::size_t>(n * k)),
        memory(cpu({.threads = 1}).allocate(packed_bytes({format}, n, k))) {
    for (float& x : exact) {
      seed = seed * 1664525U + 1013904223U;
      x = static_cast<float>(static_cast<int>(seed >> 16) - 32768) / 8192;
    }
    packed = pairs ? pack_in_pairs(format, exact.data(), n, k, memory)
                   : pack({format}, view(exact.data(), {n, k}), memory);
    unpack(packed, view(exact.data(), {n, k}));
  }
  double at(std::int64_t row, std::int64_t k) const {
    return static_cast<double>(exact[static_cast<std::size_t>(row * packed.k + k)]);
  }
};

}  // namespace shunt::test
