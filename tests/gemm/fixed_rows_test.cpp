// Rows that become blocks of integers (fixed_rows.hpp), and products of them.
#include "gemm/fixed_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/test_isa.hpp"
#include "format/plain.hpp"
#include "gemm/fixed_bound.hpp"
#include "gemm/fused.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/packed_panels.hpp"

namespace shunt::test {
namespace {

using cpu_engine::FixedBlock;
using cpu_engine::Isa;

const FormatSpec formats[] = {
    {Format::nvfp4},        {Format::mxfp4},
    {Format::int4, 32},     {Format::int4, 128},
    {Format::int8},         {Format::dense3},
    {Format::sparse_nvfp4}, {.format = Format::int4, .group = 32, .zeros = true}};
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

using Case = std::tuple<Isa, FormatSpec, DType>;
std::vector<Case> cases() {
  std::vector<Case> list;
  for (const Isa isa : all_isas()) {
    for (const FormatSpec& format : formats) {
      for (const DType dtype : {DType::bf16, DType::f16}) {
        if (fixes_rows(isa, format, dtype)) list.emplace_back(isa, format, dtype);
      }
    }
  }
  return list;
}

class FixedRows : public testing::TestWithParam<Case> {
 protected:
  Isa isa() const { return std::get<0>(GetParam()); }
  FormatSpec format() const { return std::get<1>(GetParam()); }
  DType dtype() const { return std::get<2>(GetParam()); }
  cpu_engine::FixedProduct product() const {
    return cpu_engine::fixed_product(isa(), {.format = format()}, dtype());
  }
  // Of its codes, and what is added to them.
  double unit() const {
    if (format().format == Format::sparse_nvfp4) return 0.5 / 256;
    return in_dense3() ? static_cast<double>(dense3_unit) : in_e2m1() ? 0.5 : 1;
  }
  int more() const {
    if (format().format == Format::sparse_nvfp4) return 0;
    return in_e2m1() ? 12 : format().format == Format::int8 || in_dense3() ? 128 : 1;
  }
  bool in_e2m1() const {
    return format().format == Format::nvfp4 || format().format == Format::mxfp4;
  }
  bool in_dense3() const { return format().format == Format::dense3; }
  bool in_bytes() const {
    const cpu_engine::Features& cpu = cpu_engine::features();
    return in_dense3() && isa() >= Isa::avx512 && cpu.avx512_vnni && cpu.avx512_vbmi;
  }
  bool in_planes() const {
    const cpu_engine::Features& cpu = cpu_engine::features();
    return (in_e2m1() || format().format == Format::int4) && product().group % 16 == 0 &&
           isa() >= Isa::avx512 && cpu.avx512_vnni && cpu.avx512_vbmi;
  }
  // The i-th number of a row of `size`.
  int number(const std::vector<char>& bytes, std::size_t size, std::size_t i) const {
    const char* const numbers = bytes.data() + cpu_engine::fixed_numbers_at(size, product().group);
    if (in_bytes()) {
      const std::size_t at = i / 32 * 64 + i % 32;
      return 256 * static_cast<signed char>(numbers[at]) +
             static_cast<signed char>(numbers[at + 32]);
    }
    if (in_planes()) {
      const auto* const order = cpu_engine::fixed_plane_order;
      const auto at =
          i / 8 * 16 +
          static_cast<std::size_t>(std::find(order, order + 8, static_cast<int>(i % 8)) - order);
      return 256 * static_cast<signed char>(numbers[at]) +
             static_cast<unsigned char>(numbers[at + 8]);
    }
    std::int16_t n = 0;
    std::memcpy(&n, numbers + 2 * place(i), 2);
    return n;
  }
  // Where the i-th number of a row stands.
  std::size_t place(std::size_t i) const {
    if (format().format != Format::int8 && !in_dense3()) return i;
    return i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
  }

  // Rows [rows, k] times one matrix, as rows and weights of `dtype`.
  static std::vector<float> multiply(Isa isa, DType dtype, const PackedMatrix& m, const Tensor& x,
                                     std::int64_t rows) {
    const Context context = context_of(isa, 2);
    const Buffer memory =
        context.allocate(prepared_bytes(context, dtype, prepared_format({m}), 1, m.n, m.k));
    const PreparedWeights prepared = prepare_packed(context, dtype, {m}, memory);
    std::vector<float> out(static_cast<std::size_t>(rows * m.n));
    const Buffer workspace = context.allocate(mlp_workspace_bytes(context, prepared, rows));
    mlp_gemm(context, prepared, {.rows = x}, view(out.data(), {rows, m.n}), workspace);
    return out;
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FixedRows);
INSTANTIATE_TEST_SUITE_P(All, FixedRows, testing::ValuesIn(cases()), [](const auto& p) {
  std::string name = isa_name(std::get<0>(p.param)) + "_" + to_string(std::get<1>(p.param)) + "_" +
                     to_string(std::get<2>(p.param));
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
});

// Rows that are hard on a block: one number far above the others, all sizes at once, none, the
// smallest of the type, and the largest that sums leave room for.
std::vector<Array> hard_rows(DType dtype, std::int64_t k) {
  const float smallest = dtype == DType::bf16 ? 0x1p-133F : 0x1p-24F;
  const float largest = dtype == DType::bf16 ? 0x1.fep117F : 65504.0F;
  std::vector<Array> rows;
  for (const int above : {6, 9, 13, 16, 24, 60}) {
    rows.push_back(random_array(dtype, {1, k}, 5));
    for (std::int64_t i = 3; i < k; i += 19) {
      rows.back().set(i, std::min(largest, std::ldexp(rows.back().get(i), above)));
    }
  }
  rows.push_back(random_array(dtype, {1, k}, 6));
  for (std::int64_t i = 0; i < k; ++i) {
    rows.back().set(i, std::ldexp(rows.back().get(i), static_cast<int>(i * 7 % 31) - 20));
  }
  rows.push_back(random_array(dtype, {1, k}, 7));
  for (std::int64_t i = 0; i < k; ++i) {
    rows.back().set(i, smallest * static_cast<float>(i * 5 % 301 - 150));
  }
  rows.push_back(random_array(dtype, {1, k}, 8));
  for (std::int64_t i = 0; i < k; ++i) rows.back().set(i, i % 150 == 149 ? smallest : 0);
  rows.push_back(random_array(dtype, {1, k}, 9));
  for (std::int64_t i = 0; i < k; ++i) {
    rows.back().set(i, (i % 3 == 0 ? largest : -largest) / (i % 16 == 0 ? 1.0F : 0x1p10F));
  }
  return rows;
}

// Every number is where the header says, exactly or within its bound, and blocks know their sums.
TEST_P(FixedRows, MoveNoFurtherThanTheySay) {
  for (const std::int64_t k : {1, 15, 16, 17, 96, 259}) {
    for (const Array& x : hard_rows(dtype(), k)) {
      const auto size = static_cast<std::size_t>(k), of = product().group;
      std::vector<float> from((size + 31) / 32 * 32);
      std::vector<double> row(size);
      for (std::size_t i = 0; i < size; ++i) {
        row[i] = static_cast<double>(from[i] = x.get(static_cast<std::int64_t>(i)));
      }
      std::vector<char> bytes(cpu_engine::fixed_row_bytes(size, of), 77);
      ASSERT_TRUE(product().row(from.data(), size, of, bytes.data()));
      const std::vector<double> moves = fixed_moves(isa(), format(), dtype(), row);
      for (std::size_t begin = 0; begin < size; begin += of) {
        FixedBlock block;
        std::memcpy(&block, bytes.data() + begin / of * sizeof block, sizeof block);
        std::int32_t sum = 0;
        for (std::size_t i = begin; i < std::min(begin + of, from.size()); ++i) {
          const int n = number(bytes, size, i);
          sum += n;
          const double means = static_cast<double>(n) * static_cast<double>(block.unit) / unit();
          if (i >= size) {
            EXPECT_EQ(n, 0);
          } else {
            ASSERT_LE(std::fabs(means - row[i]), moves[i]) << "k " << k << ", number " << i;
          }
        }
        EXPECT_EQ(-more() * sum, block.start);
      }
    }
  }
}

TEST_P(FixedRows, MultiplyWithinTheBound) {
  for (const std::int64_t k : {17, 160, 515}) {
    const std::int64_t n = 70;
    const Packed packed = Packed::of(format(), normal_values(n * k, 13), n, k);
    for (const Array& x : hard_rows(dtype(), k)) {
      const std::vector<float> out = multiply(isa(), dtype(), packed.packed, x.tensor, 1);
      std::vector<double> row;
      for (std::int64_t i = 0; i < k; ++i) row.push_back(static_cast<double>(x.get(i)));
      const std::vector<double> moves = fixed_moves(isa(), format(), dtype(), row);
      for (std::int64_t c = 0; c < n; ++c) {
        double sum = 0, magnitude = 0, moved = 0;
        for (std::int64_t i = 0; i < k; ++i) {
          const auto at = static_cast<std::size_t>(i);
          const double weight = plain_weight(packed.packed, c, i);
          sum += weight * row[at];
          magnitude += std::fabs(weight * row[at]);
          moved += std::fabs(weight) * moves[at];
        }
        ASSERT_NEAR(static_cast<double>(out[static_cast<std::size_t>(c)]), sum,
                    sum_bound(k + 4, magnitude + moved) + moved)
            << "k " << k << " column " << c;
      }
    }
  }
}

// The largest sums that a block can have, of one row and of as many as tiles take.
TEST_P(FixedRows, HoldTheLargestSums) {
  std::vector<FormatSpec> specs = {format()};
  if (format().format == Format::int4) {
    specs.push_back({Format::int4, static_cast<int>(cpu_engine::most_fixed_group)});
  }
  for (const FormatSpec& spec : specs) {
    ASSERT_TRUE(fixes_rows(isa(), spec, dtype()));
    const std::int64_t n = 16, k = spec.format == Format::int4 ? spec.group : 64, rows = 9;
    const Packed packed = Packed::of(spec, normal_values(n * k, 1), n, k);
    PackedMatrix m = packed.packed;
    const std::vector<std::uint8_t> zeros(static_cast<std::size_t>(n), 16);
    const std::int64_t codes = spec.format == Format::int8           ? n * k
                               : spec.format == Format::dense3       ? n * k / 32 * 12
                               : spec.format == Format::sparse_nvfp4 ? n * k / 4
                                                                     : n * k / 2;
    for (const int code : {0x00, 0x77, 0x7f, 0x80, 0xff}) {
      std::memset(m.values.as<std::uint8_t>(), code, static_cast<std::size_t>(codes));
      if (spec.format == Format::int4) m.zeros = view(zeros.data(), DType::u8, {n, 1});
      for (const float x : {255.0F, -255.0F, -128.0F}) {
        Array all(dtype(), {rows, k});
        for (std::int64_t i = 0; i < rows * k; ++i) all.set(i, x);
        const std::vector<float> many = multiply(isa(), dtype(), m, all.tensor, rows);
        const std::vector<float> out = multiply(isa(), dtype(), m, all.tensor.rows(0, 1), 1);
        for (std::int64_t c = 0; c < n; ++c) {
          const float one = out[static_cast<std::size_t>(c)];
          double sum = 0;
          for (std::int64_t i = 0; i < k; ++i) {
            sum += plain_weight(m, c, i) * static_cast<double>(x);
          }
          EXPECT_NEAR(static_cast<double>(one), sum, sum_bound(4, std::fabs(sum)));
          for (std::int64_t r = 0; r < rows; ++r) {
            EXPECT_EQ(many[static_cast<std::size_t>(r * n + c)], one) << "row " << r;
          }
        }
      }
    }
  }
}

// A row with an infinity or a NaN is multiplied as rows in f32 are, and leaves its neighbours
// alone.
TEST_P(FixedRows, InfinitiesAreMultipliedAsFloats) {
  const std::int64_t n = 70, k = 100, rows = 7;
  const Packed packed = Packed::of(format(), normal_values(n * k, 3), n, k);
  Array x = random_array(dtype(), {rows, k}, 4), wide(DType::f32, {rows, k});
  const std::vector<float> plain = multiply(isa(), dtype(), packed.packed, x.tensor, rows);
  x.set(0 * k + 99, infinity);
  x.set(3 * k + 7, -infinity);
  x.set(4 * k + 50, nan);
  x.set(6 * k + 0, infinity);
  x.set(6 * k + 1, -infinity);
  for (std::int64_t i = 0; i < rows * k; ++i) wide.set(i, x.get(i));
  const std::vector<float> got = multiply(isa(), dtype(), packed.packed, x.tensor, rows);
  const std::vector<float> floats = multiply(isa(), DType::f32, packed.packed, wide.tensor, rows);
  for (std::int64_t r = 0; r < rows; ++r) {
    const bool odd = r == 0 || r == 3 || r == 4 || r == 6;
    const std::int64_t at = r * n;
    const void* const bits = got.data() + at;
    const void* const wanted = (odd ? floats : plain).data() + at;
    EXPECT_EQ(std::memcmp(bits, wanted, static_cast<std::size_t>(n) * sizeof(float)), 0)
        << "row " << r;
    // Of two of four, what is not kept meets no number.
    if (odd && format().format != Format::sparse_nvfp4) {
      EXPECT_FALSE(std::isfinite(got[static_cast<std::size_t>(at)]));
    }
  }
}

// Sums of integers leave an instruction set no choice of its own.
TEST_P(FixedRows, EverySetGivesTheBitsOfAvx2) {
  if (!fixes_rows(Isa::avx2, format(), dtype())) GTEST_SKIP() << "rows stay floats with AVX2";
  const std::int64_t n = 130, k = 515, rows = 13;
  const Packed packed = Packed::of(format(), normal_values(n * k, 3), n, k);
  const Array x = random_array(dtype(), {rows, k}, 4);
  const std::vector<float> got = multiply(isa(), dtype(), packed.packed, x.tensor, rows);
  EXPECT_EQ(got, multiply(Isa::avx2, dtype(), packed.packed, x.tensor, rows));
}

// Nor do rows that come many at a time, by tiles where the CPU has them: in blocks of several
// tiles, of which the last is not full, with an infinity among them, and groups that end inside k.
TEST_P(FixedRows, ManyHaveTheBitsOfOneAlone) {
  std::vector<FormatSpec> specs = {format()};
  if (format() == FormatSpec{Format::int4, 32}) {
    for (const int group : {16, 48, 64, 256, 512}) specs.push_back({Format::int4, group});
  }
  for (const FormatSpec& spec : specs) {
    for (const auto& [rows, k] : {std::pair<std::int64_t, std::int64_t>{4, 96},
                                  {7, 515},
                                  {16, 129},
                                  {41, 2050},
                                  {203, 320}}) {
      const std::int64_t n = 84;
      const Packed packed = Packed::of(spec, normal_values(n * k, 3), n, k);
      Array x = random_array(dtype(), {rows, k}, 4);
      x.set(2 * k + 7, infinity);
      const std::vector<float> got = multiply(isa(), dtype(), packed.packed, x.tensor, rows);
      for (std::int64_t r = 0; r<rows; r += rows> 20 ? 19 : 1) {
        const Tensor one = x.tensor.rows(r, r + 1);
        const std::vector<float> alone = multiply(isa(), dtype(), packed.packed, one, 1);
        EXPECT_EQ(std::memcmp(alone.data(), got.data() + r * n, sizeof(float) * n), 0)
            << to_string(spec) << ", row " << r << " of " << rows << ", k " << k;
      }
    }
  }
}

TEST(FixedRowsPlan, FloatsStayWhereIntegersDoNotReach) {
  for (const Isa isa : all_isas()) {
    EXPECT_FALSE(fixes_rows(isa, {Format::int4, 32}, DType::f32));
    EXPECT_FALSE(fixes_rows(isa, {Format::int4, 4096}, DType::bf16));
    EXPECT_FALSE(fixes_rows(isa, {Format::int8}, DType::f32));
    EXPECT_FALSE(fixes_rows(isa, {Format::mxfp8}, DType::bf16));
    EXPECT_FALSE(fixes_rows(isa, {Format::dense3}, DType::f32));
    // vdpbf16ps, where it is fast, keeps rows in bf16 as they are.
    const bool vnni = isa >= Isa::avx512 && cpu_engine::features().avx512_vnni;
    for (const Format format : {Format::mxfp4, Format::int8}) {
      EXPECT_EQ(fixes_rows(isa, {format}, DType::f16), isa == Isa::avx2 || vnni);
    }
    EXPECT_EQ(fixes_rows(isa, {Format::sparse_nvfp4}, DType::f16), vnni);
    for (const DType dtype : {DType::bf16, DType::f16}) {
      EXPECT_EQ(fixes_rows(isa, {Format::dense3}, dtype), isa >= Isa::avx2);
    }
    EXPECT_EQ(fixes_rows(isa, {Format::mxfp4}, DType::bf16),
              isa == Isa::avx2 || (vnni && isa != Isa::avx512_bf16));
  }
}

#if defined(__x86_64__)
// What a CPU with VNNI and without VBMI takes: the bits of AVX2, of the same panel.
TEST(FixedRowsInWords, AreThoseOfAvx2) {
  if (!cpu_engine::features().avx512_vnni) GTEST_SKIP() << "needs AVX-512 with VNNI";
  using cpu_engine::FixedFormat;
  struct Kernels {
    FormatSpec format;
    cpu_engine::PackedScale scale;
    const FixedFormat &avx2, &vnni;
  };
  const cpu_engine::FixedKernels &avx2 = cpu_engine::avx2::fixed_kernels,
                                 &vnni = cpu_engine::avx512_vnni::fixed_kernels;
  for (const Kernels& kernels :
       {Kernels{{Format::nvfp4}, cpu_engine::PackedScale::e4m3, avx2.nvfp4, vnni.nvfp4},
        {{Format::mxfp4}, cpu_engine::PackedScale::e8m0, avx2.mxfp4, vnni.mxfp4},
        {{Format::int4, 32}, cpu_engine::PackedScale::bf16, avx2.int4, vnni.int4},
        {{Format::int4, 128}, cpu_engine::PackedScale::bf16, avx2.int4, vnni.int4}}) {
    for (const std::size_t k : {16, 100, 256, 515}) {
      const cpu_engine::PackedPanels panels{
          .format = kernels.format, .n = 64, .k = static_cast<std::int64_t>(k)};
      const auto group = static_cast<std::size_t>(panels.group());
      std::vector<char> panel(static_cast<std::size_t>(panels.panel_bytes()));
      std::uint32_t random = 1;
      for (char& byte : panel) {
        random = random * 1664525 + 1013904223;
        byte = static_cast<char>(random >> 24);
      }
      // Scales that are neither NaN nor far from one.
      const auto scales = static_cast<std::size_t>(panels.scale_bytes());
      std::size_t at = 0;
      for (std::size_t begin = 0; begin < k; begin += group) {
        for (std::size_t i = 0; i < scales; ++i) {
          const int small = panel[at + i] & 7;
          panel[at + i] = static_cast<char>(kernels.format.format == Format::mxfp4   ? 124 + small
                                            : kernels.format.format == Format::nvfp4 ? 0x30 + small
                                            : i % 2 == 0                             ? panel[at + i]
                                                                                     : 0x3e);
        }
        const std::size_t end = std::min(begin + group, k);
        at += scales +
              static_cast<std::size_t>(panels.code_bytes(static_cast<std::int64_t>(end - begin)));
      }
      ASSERT_EQ(at, panel.size());
      for (const std::size_t rows : {1, 2, 3, 4, 6, 7, 13}) {
        const Array x = random_array(
            DType::f16, {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(k)}, 22);
        const auto multiply = [&](const FixedFormat& format) {
          std::vector<std::vector<char>> fixed;
          std::vector<const void*> of;
          std::vector<float> from((k + 31) / 32 * 32);
          for (std::size_t r = 0; r < rows; ++r) {
            for (std::size_t i = 0; i < k; ++i)
              from[i] = x.get(static_cast<std::int64_t>(r * k + i));
            fixed.emplace_back(cpu_engine::fixed_row_bytes(k, group));
            EXPECT_TRUE(format.row(from.data(), k, group, fixed.back().data()));
            of.push_back(fixed.back().data());
          }
          std::vector<float> sums(64 * rows, 0.25F);
          constexpr float globals[4] = {1, 0.5F, 3, 1};
          format.multiply({.rows = of.data(),
                           .count = rows,
                           .panel = panel.data(),
                           .k = k,
                           .group = group,
                           .globals = globals,
                           .scale = kernels.scale,
                           .sums = sums.data()});
          return sums;
        };
        EXPECT_EQ(multiply(kernels.vnni), multiply(kernels.avx2))
            << to_string(kernels.format) << ", " << rows << " rows, k " << k;
      }
    }
  }
}
#endif

}  // namespace
}  // namespace shunt::test
