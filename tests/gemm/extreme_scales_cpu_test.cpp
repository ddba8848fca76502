// Products from packed weights on the CPU where scales are what their types have at their ends, and
// scales that are refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/test_isa.hpp"
#include "format/plain.hpp"
#include "gemm/extreme_scales.hpp"
#include "gemm/fixed_bound.hpp"
#include "gemm/fused.hpp"

namespace shunt::test {
namespace {

class PackedCpuScales : public testing::TestWithParam<std::tuple<cpu_engine::Isa, FormatSpec>> {};
INSTANTIATE_TEST_SUITE_P(All, PackedCpuScales,
                         testing::Combine(testing::ValuesIn(all_isas()),
                                          testing::ValuesIn(every_format())),
                         isa_and_format_name);

// Groups, and blocks of 128, that k and n end within; one row, and as many as tiles take.
TEST_P(PackedCpuScales, OfEveryKind) {
  const auto& [isa, spec] = GetParam();
  const Context context = context_of(isa, 2);
  const std::int64_t n = 136, k = 200, most_rows = 20;
  const Packed packed = Packed::of(spec, normal_values(n * k, 11), n, k);
  for (const DType dtype : {f32, bf16, f16}) {
    for (const ExtremeScales& extreme : extreme_scales(spec, dtype)) {
      SCOPED_TRACE(extreme.name + ", " + to_string(dtype));
      std::vector<std::uint32_t> memory_of_scales;
      const PackedMatrix m = with_scales(packed.packed, extreme, memory_of_scales);
      const Array x = rows_for(extreme, dtype, most_rows, k, 3);
      const Buffer memory =
          context.allocate(prepared_bytes(context, dtype, prepared_format({m}), 1, n, k));
      const PreparedWeights prepared = prepare_packed(context, dtype, {m}, memory);
      std::vector<double> weights, want, bound;
      for (std::int64_t i = 0; i < n * k; ++i) weights.push_back(plain_weight(m, i / k, i % k));
      double clearest = 0;  // how many times a result is what it may be off by
      for (std::int64_t r = 0; r < most_rows; ++r) {
        std::vector<double> row;
        for (std::int64_t i = 0; i < k; ++i) row.push_back(static_cast<double>(x.get(r * k + i)));
        const std::vector<double> moves = fixed_moves(isa, spec, dtype, row);
        for (std::int64_t c = 0; c < n; ++c) {
          double sum = 0, magnitude = 0, moved = 0;
          for (std::int64_t i = 0; i < k; ++i) {
            const auto at = static_cast<std::size_t>(i);
            const double weight = weights[static_cast<std::size_t>(c * k + i)];
            sum += weight * row[at];
            magnitude += std::fabs(weight * row[at]);
            moved += std::fabs(weight) * moves[at];
          }
          want.push_back(sum);
          bound.push_back(tiny_sum_bound(k, magnitude + moved) + moved);
          clearest = std::max(clearest, std::fabs(sum) / bound.back());
        }
      }
      ASSERT_GT(clearest, 1000) << "of nothing but rounding";
      for (const std::int64_t rows : {most_rows, std::int64_t{1}, std::int64_t{2}}) {
        const Array out(f32, {rows, n});
        const Buffer workspace = context.allocate(mlp_workspace_bytes(context, prepared, rows));
        mlp_gemm(context, prepared, {.rows = x.tensor.rows(0, rows)}, out.tensor, workspace);
        for (std::int64_t i = 0; i < rows * n; ++i) {
          const auto at = static_cast<std::size_t>(i);
          ASSERT_NEAR(static_cast<double>(out.get(i)), want[at], bound[at])
              << rows << " rows, row " << i / n << " column " << i % n;
        }
      }
    }
  }
}

// Whatever the type of a scale, and wherever it stands.
TEST(PackedCpuRefusals, ScalesThatAreNotFinite) {
  const Context context = cpu({.threads = 2});
  const std::int64_t n = 136, k = 200;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  PackedMatrix sound;
  const auto message = [&](const PackedMatrix& m) -> std::string {
    const Buffer memory =
        context.allocate(prepared_bytes(context, f32, prepared_format({m}), 2, n, k));
    try {
      prepare_packed(context, f32, {sound, m}, memory);
    } catch (const Error& error) {
      return error.what();
    }
    return "(none)";
  };
  for (const FormatSpec& spec : every_format()) {
    const Packed first = Packed::of(spec, normal_values(n * k, 1), n, k);
    const Packed p = Packed::of(spec, normal_values(n * k, 2), n, k);
    sound = first.packed;
    PackedMatrix m = p.packed;
    EXPECT_EQ(message(m), "(none)") << to_string(spec);
    if (spec.format == Format::fp8_tensor || spec.format == Format::nvfp4 ||
        spec.format == Format::sparse_nvfp4 || spec.format == Format::dense3) {
      for (const float bad : {std::nanf(""), infinity, -infinity}) {
        m.global_scale = bad;
        EXPECT_NE(message(m).find("matrices[1].global_scale is "), std::string::npos)
            << to_string(spec) << ": " << message(m);
      }
      m = p.packed;
    }
    if (!m.scales) continue;
    const auto refused = [&](std::int64_t at, const std::function<void(std::int64_t)>& spoil) {
      const std::int64_t bytes = bits(m.scales.dtype) / 8;
      std::vector<char> before(static_cast<std::size_t>(bytes));
      char* const place = m.scales.as<char>() + at * bytes;
      std::copy_n(place, bytes, before.begin());
      spoil(at);
      const std::string words = message(m);
      EXPECT_TRUE(words.find("matrices[1] holds a NaN or an infinite scale") != std::string::npos ||
                  (m.scales.dtype == f32 && words.find("matrices[1].scales[") != std::string::npos))
          << to_string(spec) << ", scale " << at << " of " << m.scales.describe() << ": " << words;
      std::copy_n(before.begin(), bytes, place);
    };
    for (const std::int64_t at : {std::int64_t{0}, m.scales.elements() - 1}) {
      if (m.scales.dtype == DType::f8_e4m3) {
        for (const std::uint8_t nan : {0x7f, 0xff}) {
          refused(at, [&](std::int64_t i) { m.scales.as<std::uint8_t>()[i] = nan; });
        }
      } else if (m.scales.dtype == DType::f8_e8m0) {
        refused(at, [&](std::int64_t i) { m.scales.as<std::uint8_t>()[i] = 0xff; });
      } else {
        for (const float bad : {std::nanf(""), infinity, -infinity}) {
          refused(at, [&](std::int64_t i) { store_f32(m.scales.data, m.scales.dtype, i, bad); });
        }
      }
    }
    if (spec.format != Format::int4) continue;
    for (const DType type : {f16, f32}) {
      std::vector<std::uint32_t> held(static_cast<std::size_t>(p.packed.scales.elements()));
      m.scales = view(static_cast<const void*>(held.data()), type, {n, p.packed.scales.shape[1]});
      for (std::int64_t i = 0; i < m.scales.elements(); ++i) {
        store_f32(held.data(), type, i, 0.5F);
      }
      EXPECT_EQ(message(m), "(none)") << to_string(type);
      for (const float bad : {std::nanf(""), infinity}) {
        refused(m.scales.elements() - 1,
                [&](std::int64_t i) { store_f32(m.scales.data, type, i, bad); });
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
