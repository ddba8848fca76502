// Rows in NVFP4: where they are multiplied, weights there and back, and the reference; on a GPU
// that has a kernel the product too.
#include <gtest/gtest.h>

#if SHUNT_CUDA_BUILT

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "checkpoint/temporary.hpp"
#include "core/convert.hpp"
#include "format/pairs.hpp"
#include "gemm/fp4_data.hpp"
#include "gemm/fp4_product.hpp"
#include "gemm/reference.hpp"
#include "shunt/context.hpp"

namespace shunt::cuda_engine {
namespace {

using Matrix = test::Fp4Matrix;

TEST(Fp4Product, IsOfTwoComputeCapabilitiesAndSaysSo) {
  EXPECT_EQ(fp4_kernel(100), Fp4Kernel::tiles);
  EXPECT_EQ(fp4_kernel(120), Fp4Kernel::fragments);
  for (const int other : {80, 90, 103, 110, 121}) EXPECT_EQ(fp4_kernel(other), Fp4Kernel::none);
  for (const int compute : {100, 120}) {
    EXPECT_TRUE(fp4_support(compute, Format::nvfp4));
    EXPECT_TRUE(fp4_support(compute, Format::sparse_nvfp4));
  }
  EXPECT_EQ(fp4_support(90, Format::nvfp4).reason,
            "rows in nvfp4 have no kernel on compute capability 9.0: must be 10.0 or 12.0");
  EXPECT_NE(fp4_support(120, Format::mxfp4).reason.find("mxfp4"), std::string::npos);
}

TEST(Fp4Product, WeightsComeBackAsTheyWere) {
  for (const Fp4Kernel kernel : {Fp4Kernel::fragments, Fp4Kernel::tiles}) {
    for (const Format format : {Format::nvfp4, Format::sparse_nvfp4}) {
      for (const bool paired : {false, true}) {
        for (const auto& [n, k] : {std::pair{16, 128}, {37, 209}, {136, 300}, {19, 33}}) {
          SCOPED_TRACE(to_string(FormatSpec{format}) + (paired ? " paired " : " ") +
                       std::to_string(n) + " " + std::to_string(k));
          const bool sparse = format == Format::sparse_nvfp4;
          const Matrix gate(n, k, 1, format, sparse), up(n, k, 2, format, sparse);
          const Fp4Weights layout{kernel, format, paired ? 2 * n : n, k, paired};
          std::vector<char> group(static_cast<std::size_t>(layout.group_bytes()));
          lay_out(layout, gate.packed, paired ? &up.packed : nullptr, group.data());
          std::vector<double> row(static_cast<std::size_t>(k), NAN);
          for (std::int64_t i = 0; i < layout.n; ++i) {
            read_row(layout, group.data(), i, row.data());
            const Matrix& of = i < n ? gate : up;
            for (std::int64_t c = 0; c < k; ++c) {
              ASSERT_EQ(static_cast<float>(row[static_cast<std::size_t>(c)]),
                        of.exact[static_cast<std::size_t>(i % n * k + c)])
                  << i << " " << c;
            }
          }
        }
      }
    }
  }
}

TEST(Fp4Product, RowsHaveRoomThatTheKernelsMayRead) {
  for (const bool sparse : {false, true}) {
    for (const std::int64_t k : {1, 16, 33, 256, 2048}) {
      const std::int64_t rows = 7, scaled = sparse ? 32 : 16;
      const Buffer memory =
          cpu({.threads = 1}).allocate(Fp4Rows::at(nullptr, rows, k, sparse).bytes);
      const Fp4Rows at = Fp4Rows::at(memory.data(), rows, k, sparse);
      EXPECT_EQ(at.code_stride % 16, 0);
      EXPECT_GE(at.code_stride, (k + 3) / 4 * 2);  // the tensor map's numbers of 16 bits
      EXPECT_EQ(at.scale_stride % 4, 0);
      EXPECT_GE(at.scale_stride, (k + scaled - 1) / scaled);
      EXPECT_GE(at.scales, at.codes + rows * at.code_stride);
      EXPECT_GE(reinterpret_cast<std::uint8_t*>(at.row_scales), at.scales + rows * at.scale_stride);
      EXPECT_LE(reinterpret_cast<char*>(at.row_scales + rows),
                static_cast<char*>(memory.data()) + memory.bytes());
    }
  }
}

// What the reference multiplies: rows rounded as matrices of one row.
TEST(Fp4Product, TheReferenceRoundsRows) {
  const std::int64_t n = 3, k = 50, rows = 4;
  for (const Format format : {Format::nvfp4, Format::sparse_nvfp4}) {
    const Matrix weights(n, k, 5, format, format == Format::sparse_nvfp4), given(rows, k, 6);
    std::vector<float> x = given.exact;
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += 0.01F * static_cast<float>(i % 7);
    GroupedGemmSpec spec{.groups = 1, .n = n, .k = k, .format = {format}, .rows = RowFormat::nvfp4};
    const GroupedGemmInputs in{.rows = view(x.data(), {rows, k}),
                               .weights = view(weights.exact.data(), {1, n, k})};
    const std::vector<double> got = grouped_gemm_reference(spec, in);
    std::vector<float> rounded(x.size());
    for (std::int64_t r = 0; r < rows; ++r) {
      const Buffer memory = cpu({.threads = 1}).allocate(packed_bytes({Format::nvfp4}, 1, k));
      const float* const row = x.data() + r * k;
      const PackedMatrix one = format == Format::sparse_nvfp4
                                   ? pack_in_pairs(Format::nvfp4, row, 1, k, memory)
                                   : pack({Format::nvfp4}, view(row, {1, k}), memory);
      unpack(one, view(rounded.data() + r * k, {1, k}));
    }
    spec.rows = RowFormat::as_dtype;
    const std::vector<double> expected =
        grouped_gemm_reference(spec, {.rows = view(rounded.data(), {rows, k}),
                                      .weights = view(weights.exact.data(), {1, n, k})});
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-4);
  }
}

TEST(Fp4Product, IsRefusedByNameOnTheCpu) {
  const GroupedGemmSpec spec{
      .groups = 1, .n = 16, .k = 64, .format = {Format::nvfp4}, .rows = RowFormat::nvfp4};
  EXPECT_NE(supports(spec, Device{}).reason.find("rows nvfp4"), std::string::npos);
  GroupedGemmSpec plain = spec;
  plain.format = {};
  EXPECT_FALSE(supports(plain, Device{DeviceType::cuda, 0}));
  EXPECT_TRUE(supports(spec, Device{DeviceType::cuda, 1000}));  // none that could be asked
}

}  // namespace
}  // namespace shunt::cuda_engine

#endif
