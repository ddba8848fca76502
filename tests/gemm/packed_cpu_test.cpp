// Products from packed weights on the CPU, against plain-double decoders of each format.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "cpu/test_isa.hpp"
#include "format/plain.hpp"
#include "gemm/fixed_bound.hpp"
#include "gemm/fused.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/ordered_data.hpp"
#include "gemm/packed_panels.hpp"

namespace shunt::test {
namespace {

struct Weights {
  std::vector<Packed> held;
  std::vector<PackedMatrix> matrices;
};
Weights random_weights(const FormatSpec& spec, int groups, std::int64_t n, std::int64_t k,
                       unsigned seed) {
  Weights w;
  for (int g = 0; g < groups; ++g) {
    w.held.push_back(Packed::of(spec, normal_values(n * k, seed + static_cast<unsigned>(g)), n, k));
  }
  for (const Packed& p : w.held) w.matrices.push_back(p.packed);
  return w;
}

class PackedCpu : public testing::TestWithParam<std::tuple<cpu_engine::Isa, FormatSpec>> {
 protected:
  FormatSpec spec() const { return std::get<1>(GetParam()); }
  Context context(int threads) const { return context_of(std::get<0>(GetParam()), threads); }
  std::vector<double> moves(DType dtype, const std::vector<double>& row) const {
    return fixed_moves(std::get<0>(GetParam()), spec(), dtype, row);
  }
};
INSTANTIATE_TEST_SUITE_P(All, PackedCpu,
                         testing::Combine(testing::ValuesIn(all_isas()),
                                          testing::ValuesIn(every_format())),
                         isa_and_format_name);

struct Size {
  std::int64_t n, k;
};
constexpr Size sizes[] = {{1, 1},   {3, 2},    {64, 16},   {65, 17},  {16, 31}, {40, 33},
                          {96, 48}, {130, 40}, {200, 130}, {33, 259}, {7, 511}, {128, 128}};
constexpr std::int32_t counts[] = {0, 1, 2, 3, 4, 5, 0, 9};
constexpr int groups = 8;

// Weights of no k need no memory.
TEST_P(PackedCpu, NothingToAddUp) {
  const Context engine = context(2);
  const GroupedGemmSpec gemm{
      .groups = 2, .n = 5, .k = 0, .dtype = f32, .bias = true, .format = spec()};
  const std::vector<std::int32_t> offsets = {0, 3, 4};
  const Array bias = random_array(f32, {2, 5}, 3);
  Array out(f32, {4, 5});
  const float none = 0;
  const Buffer workspace = engine.allocate(grouped_gemm_workspace_bytes(engine, gemm, 4));
  grouped_gemm(
      engine, gemm,
      {.rows = view(&none, {4, 0}), .offsets = view(offsets.data(), {3}), .bias = bias.tensor},
      out.tensor, workspace);
  for (std::int64_t i = 0; i < 20; ++i) EXPECT_EQ(out.get(i), bias.get((i < 15 ? 0 : 5) + i % 5));
}

// Rows in f32 and bf16, results in f32.
TEST_P(PackedCpu, MultipliesWithinTheBound) {
  const Context one = context(1), three = context(3);
  std::vector<std::int32_t> offsets = {0};
  for (const std::int32_t count : counts) offsets.push_back(offsets.back() + count);
  const std::int64_t rows = offsets.back();
  for (const auto [n, k] : sizes) {
    SCOPED_TRACE(testing::Message() << n << " x " << k);
    const Weights w = random_weights(spec(), groups, n, k, 1);
    std::vector<double> weights;
    for (const PackedMatrix& m : w.matrices) {
      for (std::int64_t i = 0; i < n * k; ++i) weights.push_back(plain_weight(m, i / k, i % k));
    }
    for (const DType dtype : {f32, bf16}) {
      SCOPED_TRACE(to_string(dtype));
      const Array x = random_array(dtype, {rows, k}, 3);
      const Array bias = random_array(f32, {groups, n}, 4);
      const std::size_t bytes = prepared_bytes(one, dtype, spec(), groups, n, k);
      const Buffer memory = one.allocate(bytes);
      const PreparedWeights prepared = prepare_packed(one, dtype, w.matrices, memory);
      EXPECT_EQ(to_string(prepared.format), to_string(resolved(spec())));
      const GroupedGemmSpec gemm{
          .groups = groups, .n = n, .k = k, .dtype = dtype, .bias = true, .format = spec()};
      const auto multiply = [&](const Context& context, const Array& in, const std::int32_t* at,
                                const Array& out) {
        const Buffer workspace =
            context.allocate(grouped_gemm_workspace_bytes(context, gemm, in.tensor.shape[0]));
        grouped_gemm(context, gemm,
                     {.rows = in.tensor,
                      .offsets = view(at, {groups + 1}),
                      .prepared = prepared,
                      .bias = bias.tensor},
                     out.tensor, workspace);
      };
      const Array out(f32, {rows, n}), again(f32, {rows, n});
      multiply(one, x, offsets.data(), out);
      multiply(three, x, offsets.data(), again);
      EXPECT_EQ(out.data, again.data);
      for (int g = 0; g < groups; ++g) {
        const auto at = static_cast<std::size_t>(g);
        for (std::int32_t r = offsets[at]; r < offsets[at + 1]; ++r) {
          std::vector<double> row;
          for (std::int64_t i = 0; i < k; ++i) row.push_back(static_cast<double>(x.get(r * k + i)));
          const std::vector<double> moves = this->moves(dtype, row);
          for (std::int64_t c = 0; c < n; ++c) {
            double sum = static_cast<double>(bias.get(g * n + c)), magnitude = std::fabs(sum);
            double moved = 0;
            for (std::int64_t i = 0; i < k; ++i) {
              const auto place = static_cast<std::size_t>(i);
              const double weight = weights[static_cast<std::size_t>((g * n + c) * k + i)];
              sum += weight * row[place];
              magnitude += std::fabs(weight * row[place]);
              moved += std::fabs(weight) * moves[place];
            }
            // A scale's product with the global one, and its own multiplication.
            ASSERT_NEAR(static_cast<double>(out.get(r * n + c)), sum,
                        sum_bound(k + 4, magnitude) + moved)
                << "row " << r << " column " << c;
          }
        }
      }
      // A row alone has the bits that it has among others.
      std::vector<std::int32_t> alone(groups + 1, 0);
      alone.back() = 1;
      Array single(dtype, {1, k});
      for (std::int64_t i = 0; i < k; ++i) single.set(i, x.get((rows - 2) * k + i));
      const Array single_out(f32, {1, n});
      multiply(one, single, alone.data(), single_out);
      EXPECT_EQ(std::memcmp(single_out.tensor.data, out.tensor.as<float>() + (rows - 2) * n,
                            static_cast<std::size_t>(n) * 4),
                0);
    }
  }
}

// A row that is 1 in one place and 0 elsewhere picks a weight: every code of a byte or a nibble
// that means a number, exact but for its scale. Of e4m3 those of normal numbers by themselves too.
TEST_P(PackedCpu, EveryCode) {
  const Context context = this->context(2);
  const std::int64_t n = 67, k = 128;
  const Packed packed = Packed::of(spec(), normal_values(n * k, 11), n, k);
  auto* const codes = packed.packed.values.as<std::uint8_t>();
  const bool fp8 = packed.packed.values.dtype == DType::f8_e4m3;
  for (const bool only_normal : {false, true}) {
    if (only_normal && !fp8) continue;
    for (std::int64_t i = 0; i < packed.packed.values.elements(); ++i) {
      auto code = static_cast<std::uint8_t>(i * 37 + i / 256);
      if (fp8 && (code & 0x7f) == 0x7f) code = 0;
      if (only_normal && (code & 0x78) == 0) code |= 0x40;
      codes[i] = code;
    }
    for (const DType dtype : {f32, bf16}) {
      Array one_hot(dtype, {k, k});
      for (std::int64_t i = 0; i < k; ++i) one_hot.set(i * k + i, 1);
      const Buffer memory = context.allocate(prepared_bytes(context, dtype, spec(), 1, n, k));
      const PreparedWeights prepared = prepare_packed(context, dtype, {packed.packed}, memory);
      const auto check = [&](std::int64_t rows) {  // at once, the last ones
        const Array out(f32, {rows, n});
        const Buffer workspace = context.allocate(mlp_workspace_bytes(context, prepared, rows));
        mlp_gemm(context, prepared, {.rows = one_hot.tensor.rows(k - rows, k)}, out.tensor,
                 workspace);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t c = 0; c < n; ++c) {
            const double weight = plain_weight(packed.packed, c, k - rows + i);
            ASSERT_NEAR(static_cast<double>(out.get(i * n + c)), weight,
                        std::fabs(weight) * 0x1p-23 + 1e-40)
                << to_string(dtype) << " k " << k - rows + i << " column " << c;
          }
        }
      };
      for (const std::int64_t rows : {k, std::int64_t{1}, std::int64_t{2}}) check(rows);
      if (HasFatalFailure()) return;
    }
  }
}

// vdpbf16ps takes subnormal numbers for zero, and returns none: a term may lose 2^-126 times its
// weight, an addition 2^-126 times the scale (less than 1 here), no more.
TEST_P(PackedCpu, TinyRowsLoseLittle) {
  const Context context = this->context(1);
  const std::int64_t n = 64, k = 160;
  const Packed packed = Packed::of(spec(), normal_values(n * k, 13), n, k);
  const Buffer memory = context.allocate(prepared_bytes(context, bf16, spec(), 1, n, k));
  const PreparedWeights prepared = prepare_packed(context, bf16, {packed.packed}, memory);
  Array x = random_array(bf16, {1, k}, 3);
  for (std::int64_t i = 0; i < k; ++i) x.set(i, x.get(i) * (i % 3 == 0 ? 0x1p-128F : 0x1p-114F));
  const Array out(f32, {1, n});
  const Buffer workspace = context.allocate(mlp_workspace_bytes(context, prepared, 1));
  mlp_gemm(context, prepared, {.rows = x.tensor}, out.tensor, workspace);
  for (std::int64_t c = 0; c < n; ++c) {
    double sum = 0, magnitude = 0, lost = 0;
    for (std::int64_t i = 0; i < k; ++i) {
      const double weight = plain_weight(packed.packed, c, i);
      const double term = weight * static_cast<double>(x.get(i));
      sum += term;
      magnitude += std::fabs(term);
      lost += 0x1p-126 * (std::fabs(weight) + 1);
    }
    EXPECT_NEAR(static_cast<double>(out.get(c)), sum,
                2 * static_cast<double>(k + 6) * 0x1p-24 * magnitude + lost);
  }
}

// Whatever a set takes for zero, it does so for one row as for many.
TEST_P(PackedCpu, TinyRowsHaveTheirBitsAloneAndInABatch) {
  const Context context = this->context(1);
  const std::int64_t n = 64, k = 200, rows = 83;
  const Packed packed = Packed::of(spec(), normal_values(n * k, 17), n, k);
  const Buffer memory = context.allocate(prepared_bytes(context, bf16, spec(), 1, n, k));
  const PreparedWeights prepared = prepare_packed(context, bf16, {packed.packed}, memory);
  Array x = random_array(bf16, {rows, k}, 3);
  for (std::int64_t i = 0; i < rows * k; ++i) {
    x.set(i, x.get(i) * (i % 3 == 0 ? 0x1p-128F : 0x1p-122F));
  }
  const auto multiply = [&](std::int64_t first, std::int64_t count) {
    Array some(bf16, {count, k});
    for (std::int64_t i = 0; i < count * k; ++i) some.set(i, x.get(first * k + i));
    Array out(f32, {count, n});
    const Buffer workspace = context.allocate(mlp_workspace_bytes(context, prepared, count));
    mlp_gemm(context, prepared, {.rows = some.tensor}, out.tensor, workspace);
    return out;
  };
  const Array all = multiply(0, rows);
  for (const std::int64_t count : {1, 2, 3}) {
    for (std::int64_t first = 0; first + count <= rows; first += 5) {
      const Array some = multiply(first, count);
      EXPECT_EQ(std::memcmp(some.tensor.data, all.tensor.as<float>() + first * n,
                            static_cast<std::size_t>(count * n) * sizeof(float)),
                0)
          << "rows " << first << " to " << first + count;
    }
  }
}

TEST_P(PackedCpu, UnpreparesExactly) {
  const Context context = this->context(2);
  for (const auto [n, k] : sizes) {
    if (n % 2 != 0) continue;
    const Weights gate = random_weights(spec(), 2, n / 2, k, 5);
    const Weights up = random_weights(spec(), 2, n / 2, k, 7);
    const Buffer memory = context.allocate(prepared_bytes(context, bf16, spec(), 2, n, k, true));
    const PreparedWeights prepared =
        prepare_packed_paired(context, bf16, gate.matrices, up.matrices, memory);
    for (int g = 0; g < 2; ++g) {
      std::vector<float> got(static_cast<std::size_t>(n * k));
      unprepare(context, prepared, g, view(got.data(), {n, k}));
      for (std::int64_t i = 0; i < n; ++i) {
        const PackedMatrix& m = (i < n / 2 ? gate : up).matrices[static_cast<std::size_t>(g)];
        for (std::int64_t j = 0; j < k; ++j) {
          ASSERT_EQ(got[static_cast<std::size_t>(i * k + j)],
                    static_cast<float>(plain_weight(m, i % (n / 2), j)));
        }
      }
    }
  }
}

// SwiGLU of gate and up, prepared in f32 and paired, against their values in double.
void expect_swiglu(const Context& context, const PreparedWeights& prepared,
                   const PackedMatrix& gate, const PackedMatrix& up) {
  const std::int64_t intermediate = gate.n, k = gate.k, rows = 5;
  const Array x = random_array(f32, {rows, k}, 3);
  const Array out(f32, {rows, intermediate});
  const Buffer workspace = context.allocate(mlp_workspace_bytes(context, prepared, rows));
  mlp_gate_up(context, prepared, {}, {.rows = x.tensor}, out.tensor, workspace);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < intermediate; ++c) {
      double g = 0, u = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        g += plain_weight(gate, c, i) * static_cast<double>(x.get(r * k + i));
        u += plain_weight(up, c, i) * static_cast<double>(x.get(r * k + i));
      }
      ASSERT_NEAR(static_cast<double>(out.get(r * intermediate + c)), g / (1 + std::exp(-g)) * u,
                  2e-5);
    }
  }
}

// Gate and up with global scales far apart.
TEST_P(PackedCpu, GateAndUpKeepTheirScales) {
  const Context context = this->context(2);
  const std::int64_t intermediate = 72, k = 80;
  const Packed gate = Packed::of(spec(), normal_values(intermediate * k, 1), intermediate, k);
  const Packed up = Packed::of(spec(), normal_values(intermediate * k, 2, 0.9F), intermediate, k);
  const Buffer memory =
      context.allocate(prepared_bytes(context, f32, spec(), 1, 2 * intermediate, k, true));
  const PreparedWeights prepared =
      prepare_packed_paired(context, f32, {gate.packed}, {up.packed}, memory);
  expect_swiglu(context, prepared, gate.packed, up.packed);
}

#if defined(__x86_64__)
// Which of the two a CPU takes is a matter of speed alone. Panels that end inside a group, and more
// rows than a register tile has.
TEST(PackedCpuKernels, ShiftsHaveTheBitsOfProducts) {
  if (!cpu_engine::supported(cpu_engine::Isa::avx512_bf16)) GTEST_SKIP() << "no vdpbf16ps";
  const std::int64_t n = 64, k = 84, rows = 9;
  std::vector<std::uint16_t> numbers(static_cast<std::size_t>(rows * (k + 16)));
  std::mt19937 random(7);
  for (std::uint16_t& x : numbers) {
    x = static_cast<std::uint16_t>(0x3f00 + random() % 256 + random() % 2 * 0x8000);
  }
  std::vector<const void*> row;
  for (std::int64_t r = 0; r < rows; ++r) row.push_back(numbers.data() + r * (k + 16));
  for (const FormatSpec& spec : every_format()) {
    if (!cpu_engine::packed_dots(cpu_engine::Isa::avx512_bf16, spec.format)) continue;
    const Packed packed = Packed::of(spec, normal_values(n * k, 3), n, k);
    const cpu_engine::PackedPanels panels{prepared_format({packed.packed}), n, k};
    const Buffer memory = cpu().allocate(static_cast<std::size_t>(panels.group_bytes()));
    char* const group = static_cast<char*>(memory.data());
    cpu_engine::write_packed_header(panels, packed.packed, nullptr, group);
    ASSERT_TRUE(cpu_engine::write_packed_panel(panels, packed.packed, nullptr, 0, group));
    cpu_engine::PackedHeader header;
    std::memcpy(&header, group, sizeof header);
    const float globals[4] = {header.global[0], header.global[0], header.global[0],
                              header.global[0]};
    const auto product = [&](const cpu_engine::PackedKernels& kernels, std::size_t count) {
      std::vector<float> sums(count * 64, 0.25F);
      cpu_engine::packed_kernel(
          kernels, spec.format)({.rows = row.data(),
                                 .count = count,
                                 .panel = group + panels.panels_at(),
                                 .k = static_cast<std::size_t>(k),
                                 .group = static_cast<std::size_t>(panels.group()),
                                 .globals = globals,
                                 .scale = cpu_engine::packed_scale(spec.format, header.halves != 0),
                                 .zeros = panels.format.zeros,
                                 .sums = sums.data()});
      return sums;
    };
    for (std::size_t count = 1; count <= static_cast<std::size_t>(rows); ++count) {
      const std::vector<float> got =
          product(cpu_engine::avx512_bf16::packed_kernels_by_shifts, count);
      EXPECT_EQ(got, product(cpu_engine::avx512_bf16::packed_kernels, count))
          << to_string(spec) << ", rows " << count;
      EXPECT_NE(got, std::vector<float>(count * 64, 0.25F));
    }
  }
}
#endif

TEST(PackedCpuRefusals, ByName) {
  const Context context = cpu({.threads = 1});
  const auto message = [&](std::vector<PackedMatrix> matrices) -> std::string {
    const Buffer memory = context.allocate(1 << 16);
    try {
      prepare_packed(context, f32, matrices, memory);
    } catch (const Error& error) {
      return error.what();
    }
    return "(none)";
  };
  const Packed a = Packed::of({Format::nvfp4}, normal_values(128, 1), 4, 32);
  const Packed b = Packed::of({Format::mxfp4}, normal_values(128, 1), 4, 32);
  EXPECT_NE(message({a.packed, b.packed}).find("matrices[1] is mxfp4"), std::string::npos);
  a.packed.scales.as<std::uint8_t>()[3] = 0x7f;
  EXPECT_NE(message({a.packed}).find("matrices[0] holds a NaN"), std::string::npos);
  b.packed.scales.as<std::uint8_t>()[3] = 0xff;
  EXPECT_NE(message({b.packed}).find("matrices[0] holds a NaN"), std::string::npos);
  const Packed c = Packed::of({Format::fp8_channel}, normal_values(128, 1), 4, 32);
  c.packed.values.as<std::uint8_t>()[77] = 0xff;
  EXPECT_NE(message({c.packed}).find("matrices[0] holds a NaN"), std::string::npos);
  const Packed d = Packed::of({Format::int4}, normal_values(128, 1), 4, 32);
  const Packed e = Packed::of({Format::int4, 16}, normal_values(128, 1), 4, 32);
  std::vector<std::int32_t> order(32, 0);
  std::fill_n(order.begin(), 15, 1);
  PackedMatrix m = e.packed;
  m.group_of = view(order.data(), {32});
  EXPECT_NE(message({m}).find("group_of names group 0 17 times: must be 16 times"),
            std::string::npos);
  std::fill_n(order.begin(), 16, 1);
  EXPECT_EQ(message({m}), "(none)");
  EXPECT_NE(message({d.packed, m}).find("matrices[1] is int4:16"), std::string::npos);
  EXPECT_FALSE(supports(
      GroupedGemmSpec{.groups = 1, .n = 4, .k = 4, .format = {Format::nvfp4, 0, true}}, Device{}));
  const std::vector<float> scales(4, 0.1F);
  m = d.packed;
  m.scales = view(scales.data(), {4, 1});
  EXPECT_NE(message({m}).find("scales[0, 0] is 0.1: must be exact in bf16"), std::string::npos);
  try {
    prepare_packed(context, f32, {d.packed}, {});
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("prepare_packed: memory is null"), std::string::npos);
  }
  PackedMatrix gate = d.packed, up = d.packed;
  const std::vector<std::uint16_t> halves(4, f32_to_f16(0.5F)), small(4, f32_to_bf16(1e-10F));
  gate.scales = view(halves.data(), f16, {4, 1});
  up.scales = view(small.data(), bf16, {4, 1});
  const Buffer memory = context.allocate(1 << 16);
  try {
    prepare_packed_paired(context, f32, {gate}, {up}, memory);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::unsupported);
    EXPECT_NE(std::string(error.what()).find("must be exact in f16, which"), std::string::npos);
  }
  const std::vector<std::uint8_t> zeros = {8, 16, 17, 0};
  m = d.packed;
  m.zeros = view(zeros.data(), DType::u8, {4, 1});
  EXPECT_NE(message({m}).find("zeros[2, 0] is 17: must be at most 16"), std::string::npos);
  EXPECT_FALSE(supports(
      GroupedGemmSpec{.groups = 1, .n = 4, .k = 4, .prepared = false, .format = {Format::nvfp4}},
      Device{}));
}

class OrderedCpu : public testing::TestWithParam<cpu_engine::Isa> {};
INSTANTIATE_TEST_SUITE_P(All, OrderedCpu, testing::ValuesIn(all_isas()),
                         [](const auto& p) { return std::string(isa_name(p.param)); });

// The product is the one of sorted weights with rows sorted likewise, bit for bit; a matrix without
// an order may stand beside.
TEST_P(OrderedCpu, MultipliesAsIfSorted) {
  const Context context = context_of(GetParam(), 2);
  const std::vector<std::int32_t> offsets = {0, 3, 3, 8, 9};
  for (const auto [n, k, group] :
       {std::array<std::int64_t, 3>{3, 32, 16}, {70, 100, 32}, {20, 33, 16}, {64, 256, 128}}) {
    SCOPED_TRACE(testing::Message() << n << " x " << k << " by " << group);
    std::vector<Ordered> ordered;
    for (unsigned g = 0; g < 3; ++g) ordered.emplace_back(n, k, static_cast<int>(group), g + 1);
    std::vector<PackedMatrix> shuffled, sorted;
    for (const Ordered& o : ordered) {
      shuffled.push_back(o.shuffled);
      shuffled.back().group_of = view(o.group_of.data(), {k});
      sorted.push_back(o.sorted.packed);
    }
    shuffled.push_back(sorted[0]);
    sorted.push_back(sorted[0]);
    const Array x = random_array(bf16, {9, k}, 3);
    Array y(bf16, {9, k});
    for (std::int64_t r = 0; r < 9; ++r) {
      for (std::int64_t i = 0; i < k; ++i) {
        const std::int64_t place = r < 3   ? ordered[0].place[static_cast<std::size_t>(i)]
                                   : r < 8 ? ordered[2].place[static_cast<std::size_t>(i)]
                                           : i;
        y.set(r * k + place, x.get(r * k + i));
      }
    }
    const auto multiply = [&](const std::vector<PackedMatrix>& matrices, bool in_order,
                              const Array& rows) {
      const FormatSpec format{Format::int4, static_cast<int>(group), in_order};
      const GroupedGemmSpec gemm{.groups = 4, .n = n, .k = k, .dtype = bf16, .format = format};
      const Buffer memory = context.allocate(prepared_bytes(context, bf16, format, 4, n, k));
      const PreparedWeights prepared = prepare_packed(context, bf16, matrices, memory);
      EXPECT_EQ(prepared.format, format);
      EXPECT_EQ(prepared.bytes, memory.bytes());
      for (int g = 0; g < 4; ++g) {
        std::vector<float> got(static_cast<std::size_t>(n * k)), wanted(got.size());
        unprepare(context, prepared, g, view(got.data(), {n, k}));
        unpack(matrices[static_cast<std::size_t>(g)], view(wanted.data(), {n, k}));
        EXPECT_EQ(got, wanted);
      }
      const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, gemm, 9));
      Array out(f32, {9, n});
      grouped_gemm(
          context, gemm,
          {.rows = rows.tensor, .offsets = view(offsets.data(), {5}), .prepared = prepared},
          out.tensor, workspace);
      return out.data;
    };
    EXPECT_EQ(multiply(shuffled, true, x), multiply(sorted, false, y));
  }
}

// Gate and up of one order, and of two.
TEST_P(OrderedCpu, GateAndUpMayDiffer) {
  const Context context = context_of(GetParam(), 2);
  const std::int64_t intermediate = 40, k = 96;
  const Ordered gate(intermediate, k, 32, 1), other(intermediate, k, 32, 2);
  Ordered same(intermediate, k, 32, 3);
  same.shuffled.group_of = view(gate.group_of.data(), {k});
  const FormatSpec format{Format::int4, 32, true};
  const PackedMatrix* const ups[] = {&other.shuffled, &same.shuffled, &other.sorted.packed};
  for (const PackedMatrix* up : ups) {
    PackedMatrix first = gate.shuffled;
    first.group_of = view(gate.group_of.data(), {k});
    const Buffer memory =
        context.allocate(prepared_bytes(context, f32, format, 1, 2 * intermediate, k, true));
    const PreparedWeights prepared = prepare_packed_paired(context, f32, {first}, {*up}, memory);
    std::vector<float> both(static_cast<std::size_t>(2 * intermediate * k));
    unprepare(context, prepared, 0, view(both.data(), {2 * intermediate, k}));
    for (std::int64_t at = 0; at < intermediate * k; ++at) {
      ASSERT_EQ(both[static_cast<std::size_t>(at)],
                static_cast<float>(plain_weight(first, at / k, at % k)));
    }
    expect_swiglu(context, prepared, first, *up);
  }
}

// Zero points of AWQ and GPTQ, and f16 scales.
class PackedCpuInt4 : public testing::TestWithParam<std::tuple<cpu_engine::Isa, DType>> {};
INSTANTIATE_TEST_SUITE_P(
    All, PackedCpuInt4, testing::Combine(testing::ValuesIn(all_isas()), testing::Values(f32, bf16)),
    [](const auto& p) {
      return isa_name(std::get<0>(p.param)) + "_" + to_string(std::get<1>(p.param));
    });

TEST_P(PackedCpuInt4, ZeroPointsAndHalves) {
  const Context context = context_of(std::get<0>(GetParam()), 1);
  const DType dtype = std::get<1>(GetParam());
  const std::int64_t n = 20, k = 72, most_rows = 19;
  const Packed p = Packed::of({Format::int4, 32}, normal_values(n * k, 1), n, k);
  std::vector<std::uint8_t> zeros;
  std::vector<std::uint16_t> scales;
  for (int i = 0; i < n * 3; ++i) {
    zeros.push_back(static_cast<std::uint8_t>(i * 5 % 17));
    scales.push_back(f32_to_f16(0.01F + 0.001F * static_cast<float>(i)));
  }
  PackedMatrix m = p.packed;
  m.zeros = view(zeros.data(), DType::u8, {n, 3});
  m.scales = view(scales.data(), DType::f16, {n, 3});
  const FormatSpec format = prepared_format({m});
  EXPECT_TRUE(format.zeros);
  const Buffer memory = context.allocate(prepared_bytes(context, dtype, format, 1, n, k));
  const PreparedWeights prepared = prepare_packed(context, dtype, {m}, memory);
  EXPECT_EQ(prepared.format, format);
  const Array x = random_array(dtype, {most_rows, k}, 3);
  for (const std::int64_t rows : {1, 2, 3, 4, 6, 9, 19}) {
    const Array out(f32, {rows, n});
    const Buffer workspace = context.allocate(mlp_workspace_bytes(context, prepared, rows));
    mlp_gemm(context, prepared, {.rows = x.tensor.rows(0, rows)}, out.tensor, workspace);
    for (std::int64_t at = 0; at < rows * n; ++at) {
      double sum = 0, magnitude = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        const double term = plain_weight(m, at % n, i) * static_cast<double>(x.get(at / n * k + i));
        sum += term;
        magnitude += std::fabs(term);
      }
      EXPECT_NEAR(static_cast<double>(out.get(at)), sum, sum_bound(k + 4, magnitude))
          << rows << " rows, " << at;
    }
  }
}

// Gate's scales and up's may be of unlike types where one of 16 bits holds both exactly.
TEST_P(PackedCpuInt4, APairsScalesMayBeOfUnlikeTypes) {
  const Context context = context_of(std::get<0>(GetParam()), 1);
  const DType dtype = std::get<1>(GetParam());
  const std::int64_t n = 20, k = 72;
  const Packed gate = Packed::of({Format::int4, 32}, normal_values(n * k, 1), n, k),
               up = Packed::of({Format::int4, 32}, normal_values(n * k, 2), n, k);
  const auto with = [&](const Packed& p, DType of, float scale, std::vector<std::uint32_t>& held) {
    held.assign(static_cast<std::size_t>(n * 3), 0);
    for (std::int64_t i = 0; i < n * 3; ++i) {
      store_f32(held.data(), of, i, scale * static_cast<float>(1 + i % 7));
    }
    PackedMatrix m = p.packed;
    m.scales = view(held.data(), of, {n, 3});
    return m;
  };
  for (const DType g : {DType::f16, DType::bf16, f32}) {
    for (const DType u : {DType::f16, DType::bf16, f32}) {
      std::vector<std::uint32_t> first, second;
      const PackedMatrix a = with(gate, g, 0.0625F, first), b = with(up, u, 0.25F, second);
      const FormatSpec format = prepared_format({a}, {b});
      const Buffer memory =
          context.allocate(prepared_bytes(context, dtype, format, 1, 2 * n, k, true));
      const PreparedWeights prepared = prepare_packed_paired(context, dtype, {a}, {b}, memory);
      const Array back(f32, {2 * n, k});
      unprepare(context, prepared, 0, back.tensor);
      for (std::int64_t i = 0; i < 2 * n * k; ++i) {
        const std::int64_t row = i / k;
        ASSERT_EQ(back.get(i), static_cast<float>(row < n ? plain_weight(a, row, i % k)
                                                          : plain_weight(b, row - n, i % k)))
            << to_string(g) << ", " << to_string(u) << ", row " << row;
      }
      if (g == DType::f16 && u != DType::f16) {  // beyond f16
        const PackedMatrix large = with(up, u, 0x1p20F, second);
        try {
          prepare_packed_paired(context, dtype, {a}, {large}, memory);
          ADD_FAILURE() << "accepted";
        } catch (const Error& error) {
          EXPECT_EQ(error.status(), Status::unsupported);
          EXPECT_NE(std::string(error.what()).find("up[0].scales[0, 0] is 1048576"),
                    std::string::npos)
              << error.what();
        }
      }
    }
  }
}

// What GPTQ writes for weights without zero points; kept, they would be bytes that say nothing.
TEST_P(PackedCpuInt4, ZerosOfEightAreNotKept) {
  const Context context = context_of(std::get<0>(GetParam()), 1);
  const DType dtype = std::get<1>(GetParam());
  const std::int64_t n = 70, k = 96;
  for (const int group : {32, 96}) {
    const Packed p = Packed::of({Format::int4, group}, normal_values(n * k, 1), n, k);
    std::vector<std::uint8_t> zeros(static_cast<std::size_t>(n * (k / group)), 8);
    PackedMatrix eights = p.packed, other = p.packed;
    eights.zeros = other.zeros =
        view(static_cast<const void*>(zeros.data()), DType::u8, {n, k / group});
    EXPECT_FALSE(prepared_format({eights, p.packed}).zeros);
    const auto product = [&](const PackedMatrix& m, const FormatSpec& format, std::int64_t rows) {
      const Buffer memory = context.allocate(prepared_bytes(context, dtype, format, 1, n, k));
      const PreparedWeights prepared = prepare_packed(context, dtype, {m}, memory);
      EXPECT_EQ(prepared.format, format);
      const Array x = random_array(dtype, {rows, k}, 3), back(f32, {n, k});
      unprepare(context, prepared, 0, back.tensor);
      for (std::int64_t i = 0; i < n * k; ++i) {
        EXPECT_EQ(back.get(i), static_cast<float>(plain_weight(m, i / k, i % k)));
      }
      std::vector<float> out(static_cast<std::size_t>(rows * n));
      const Buffer workspace = context.allocate(mlp_workspace_bytes(context, prepared, rows));
      mlp_gemm(context, prepared, {.rows = x.tensor}, view(out.data(), {rows, n}), workspace);
      return out;
    };
    for (const std::int64_t rows : {1, 2, 3, 5, 19}) {
      zeros[0] = 8;
      const std::vector<float> without = product(p.packed, p.packed.format, rows);
      EXPECT_EQ(product(eights, p.packed.format, rows), without);
      // One that is not 8: all are kept, and no other column changes a bit.
      zeros[0] = 7;
      FormatSpec kept = p.packed.format;
      kept.zeros = true;
      EXPECT_EQ(prepared_format({p.packed, other}), kept);
      EXPECT_EQ(prepared_bytes(context, dtype, kept, 1, n, k) -
                    prepared_bytes(context, dtype, p.packed.format, 1, n, k),
                static_cast<std::size_t>(k / group) * 2 * 64);
      const std::vector<float> with = product(other, kept, rows);
      for (std::int64_t at = 0; at < rows * n; ++at) {
        const auto i = static_cast<std::size_t>(at);
        EXPECT_TRUE(at % n == 0 ? with[i] != without[i] : with[i] == without[i]) << at;
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
