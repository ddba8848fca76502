// Products from packed weights on a GPU where scales are what their types have at their ends, by
// every kernel for few rows and for many, against double precision; and scales that are refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "engine.hpp"
#include "format/plain.hpp"
#include "gemm/extreme_scales.hpp"
#include "gemm/on_hopper.hpp"
#include "gemm/packed_data.hpp"
#include "shunt/gemm.hpp"
#if SHUNT_CUDA_BUILT
#include "gemm/fragment_prepare.hpp"

namespace shunt::test {
namespace {

using cuda_engine::PackedPlan;

constexpr float infinity = std::numeric_limits<float>::infinity();

// What rows of a matrix give, and by how much that may be off; `loss` as a part of each weight.
struct Expected {
  std::vector<double> want, bound;
  double clearest = 0;  // how many times a result is what it may be off by

  Expected(const std::vector<double>& weights, const Array& x, std::int64_t n, double loss) {
    const std::int64_t rows = x.tensor.shape[0], k = x.tensor.shape[1];
    for (std::int64_t r = 0; r < rows; ++r) {
      std::vector<double> row;
      for (std::int64_t i = 0; i < k; ++i) row.push_back(static_cast<double>(x.get(r * k + i)));
      for (std::int64_t c = 0; c < n; ++c) {
        double sum = 0, magnitude = 0;
        for (std::int64_t i = 0; i < k; ++i) {
          const double term =
              weights[static_cast<std::size_t>(c * k + i)] * row[static_cast<std::size_t>(i)];
          sum += term;
          magnitude += std::fabs(term);
        }
        want.push_back(sum);
        bound.push_back(tiny_sum_bound(k, magnitude) + (3e-7 + loss) * magnitude);
        clearest = std::max(clearest, std::fabs(sum) / bound.back());
      }
    }
  }
};

// One matrix for each group; tiles that are full, and not.
TEST(PackedGemm, ScalesOfEveryKind) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  const std::int64_t n = 136, k = 200;
  const std::vector<std::int32_t> offsets = {0, 3, 3, 43};
  const std::int64_t rows = offsets.back();
  for (const FormatSpec& spec : every_format()) {
    const Packed packed = Packed::of(spec, normal_values(n * k, 11), n, k);
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const ExtremeScales& extreme : extreme_scales(spec, dtype)) {
        if (extreme.not_on_a_gpu) continue;
        SCOPED_TRACE(to_string(spec) + ", " + extreme.name + ", " + to_string(dtype));
        std::vector<std::uint32_t> memory_of_scales;
        const PackedMatrix m = with_scales(packed.packed, extreme, memory_of_scales);
        std::vector<double> weights;
        for (std::int64_t i = 0; i < n * k; ++i) weights.push_back(plain_weight(m, i / k, i % k));
        // Kernels for many rows round weights of int4 and dense3 (PackedGemm's other tests).
        const bool bf16_rows = dtype == DType::bf16;
        const double loss = spec.format == Format::int4     ? (bf16_rows ? 0x1.01p-7 : 0x1p-10)
                            : spec.format == Format::dense3 ? (bf16_rows ? 0x1p-8 : 0)
                                                            : 0;
        const Array x = rows_for(extreme, dtype, rows, k, 3);
        const Expected of_few(weights, x, n, 0), of_many(weights, x, n, loss);
        ASSERT_GT(of_few.clearest, 500) << "of nothing but rounding";
        const Buffer memory = context.allocate(prepared_bytes(context, dtype, spec, 3, n, k));
        const PreparedWeights prepared = prepare_packed(context, dtype, {m, m, m}, memory);
        Array out(DType::f32, {rows, n});
        Mirror mirror(context);
        const cuda_engine::FragmentProduct product{
            .layout = cuda_engine::fragments_of(prepared),
            .groups = 3,
            .prepared = prepared.data,
            .offsets = mirror.in(view(offsets.data(), {4})).as<const std::int32_t>(),
            .rows = mirror.in(x.tensor),
            .out = mirror.out(out.tensor)};
        for (const PackedPlan& plan : every_fragment_plan(cuda_engine::sizes_of(product),
                                                          cuda_engine::figures(context.gpu()))) {
          SCOPED_TRACE(cuda_engine::fragment_words(plan));
          mirror.poison();
          ASSERT_TRUE(cuda_engine::multiply_as_planned(context.gpu(), plan, product));
          mirror.fetch();
          const Expected& of = plan.kernel == PackedPlan::many_rows ? of_many : of_few;
          for (std::int64_t i = 0; i < rows * n; ++i) {
            const auto at = static_cast<std::size_t>(i);
            ASSERT_NEAR(static_cast<double>(out.get(i)), of.want[at], of.bound[at])
                << "row " << i / n << " column " << i % n;
          }
        }
      }
    }
  }
}

// Of rows in fp8: scales of weights that are small, large, zero or negative, and rows' that make up
// for them.
TEST(Fp8Gemm, ScalesOfEveryKind) {
  SHUNT_ON_HOPPER_ONLY();
  const Context context = cuda();
  const std::int64_t n = 136, k = 264;
  for (const Format format : {Format::fp8_block, Format::fp8_channel, Format::fp8_tensor}) {
    const FormatSpec spec{.format = format};
    const RowFormat row_format =
        format == Format::fp8_block ? RowFormat::fp8_block : RowFormat::fp8_token;
    const std::int64_t block = format == Format::fp8_block ? 128 : k,
                       blocks = (k + block - 1) / block;
    const Packed packed = Packed::of(spec, normal_values(n * k, 11), n, k);
    for (const ExtremeScales& extreme : extreme_scales(spec, DType::bf16)) {
      for (const float of_rows : {1.0F, 0x1p-60F, 0x1p20F}) {
        const bool small = extreme.name == "small";
        const bool large = extreme.name == "large" || extreme.name == "rows far apart";
        if ((small && of_rows < 1) || (large && of_rows > 1)) continue;  // no f32 any more
        std::vector<std::uint32_t> memory_of_scales;
        const PackedMatrix m = with_scales(packed.packed, extreme, memory_of_scales);
        const Buffer memory = context.allocate(
            prepared_bytes(context, DType::bf16, spec, 1, n, k, false, row_format));
        const PreparedWeights prepared =
            prepare_packed(context, DType::bf16, {m}, memory, row_format);
        for (const std::int64_t rows : {3, 70, 400}) {
          SCOPED_TRACE(testing::Message() << to_string(spec) << ", " << extreme.name << ", " << rows
                                          << " rows with scales of " << of_rows);
          Array x = random_array(DType::f32, {rows, k}, 5);
          Array codes(DType::f8_e4m3, {rows, k});
          for (std::int64_t i = 0; i < rows * k; ++i) codes.set(i, 40 * x.get(i));
          std::vector<float> scales;
          for (std::int64_t r = 0; r < rows * blocks; ++r) {
            scales.push_back(of_rows * (1 + static_cast<float>(r % 5)));
          }
          const Tensor row_scales =
              blocks == 1 ? view(scales.data(), {rows}) : view(scales.data(), {rows, blocks});
          const GroupedGemmSpec gemm{.groups = 1,
                                     .n = n,
                                     .k = k,
                                     .dtype = DType::bf16,
                                     .format = spec,
                                     .rows = row_format};
          Array out(DType::f32, {rows, n});
          Mirror mirror(context);
          const GroupedGemmInputs in{.rows = mirror.in(codes.tensor),
                                     .prepared = prepared,
                                     .row_scales = mirror.in(row_scales)};
          const Tensor to = mirror.out(out.tensor);
          mirror.poison();
          grouped_gemm(context, gemm, in, to, {});
          mirror.fetch();
          double clearest = 0;
          for (std::int64_t r = 0; r < rows; r += rows / 20 + 1) {
            for (std::int64_t c = 0; c < n; ++c) {
              double want = 0, bound = 0x1p-140 * static_cast<double>(k);
              for (std::int64_t begin = 0; begin < k; begin += 128) {
                double part = 0, largest = 0;
                const auto scale = static_cast<double>(
                    scales[static_cast<std::size_t>(r * blocks + begin / block)]);
                for (std::int64_t i = begin; i < std::min(k, begin + 128); ++i) {
                  const double term =
                      plain_weight(m, c, i) * static_cast<double>(codes.get(r * k + i)) * scale;
                  part += term;
                  largest = std::max({largest, std::fabs(term), std::fabs(part)});
                }
                want += part;
                bound += fp8_step_bound(largest) + 1e-6 * (std::fabs(part) + std::fabs(want));
              }
              ASSERT_NEAR(static_cast<double>(out.get(r * n + c)), want, bound)
                  << "row " << r << " column " << c;
              clearest = std::max(clearest, std::fabs(want) / bound);
            }
          }
          EXPECT_GT(clearest, 5) << "of nothing but rounding";
        }
      }
    }
  }
}

TEST(PackedGemm, RefusesScalesThatAreNotFinite) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  const std::int64_t n = 136, k = 200;
  for (const FormatSpec& spec : every_format()) {
    const Packed sound = Packed::of(spec, normal_values(n * k, 1), n, k);
    const Packed p = Packed::of(spec, normal_values(n * k, 2), n, k);
    const auto message = [&](const PackedMatrix& m) -> std::string {
      const Buffer memory =
          context.allocate(prepared_bytes(context, DType::bf16, prepared_format({m}), 2, n, k));
      try {
        prepare_packed(context, DType::bf16, {sound.packed, m}, memory);
      } catch (const Error& error) {
        return error.what();
      }
      return "(none)";
    };
    PackedMatrix m = p.packed;
    EXPECT_EQ(message(m), "(none)") << to_string(spec);
    if (m.global_scale != 1) {
      m.global_scale = std::nanf("");
      EXPECT_NE(message(m).find("matrices[1].global_scale is "), std::string::npos)
          << to_string(spec) << ": " << message(m);
      m = p.packed;
    }
    if (!m.scales) continue;
    for (const std::int64_t at : {std::int64_t{0}, m.scales.elements() - 1}) {
      for (const float bad : {std::nanf(""), infinity}) {
        const std::int64_t bytes = bits(m.scales.dtype) / 8;
        std::vector<char> before(static_cast<std::size_t>(bytes));
        char* const place = m.scales.as<char>() + at * bytes;
        std::copy_n(place, bytes, before.begin());
        if (m.scales.dtype == DType::f8_e4m3) {
          m.scales.as<std::uint8_t>()[at] = std::isnan(bad) ? 0x7f : 0xff;
        } else if (m.scales.dtype == DType::f8_e8m0) {
          m.scales.as<std::uint8_t>()[at] = 0xff;
        } else {
          store_f32(m.scales.data, m.scales.dtype, at, bad);
        }
        const std::string words = message(m);
        EXPECT_NE(words.find("matrices[1] holds a NaN or an infinite scale"), std::string::npos)
            << to_string(spec) << ", scale " << at << " is " << bad << ": " << words;
        std::copy_n(before.begin(), bytes, place);
      }
    }
  }
}

// Weights for rows in fp8 likewise.
TEST(Fp8Gemm, RefusesScalesAndCodesThatAreNotFinite) {
  SHUNT_ON_HOPPER_ONLY();
  const Context context = cuda();
  const std::int64_t n = 200, k = 264;
  for (const Format format : {Format::fp8_block, Format::fp8_channel}) {
    const FormatSpec spec{.format = format};
    const RowFormat rows =
        format == Format::fp8_block ? RowFormat::fp8_block : RowFormat::fp8_token;
    const Buffer memory =
        context.allocate(prepared_bytes(context, DType::bf16, spec, 1, n, k, false, rows));
    for (const float bad : {std::nanf(""), infinity, 0.0F, 1.0F}) {  // 0: a code; 1: none
      SCOPED_TRACE(testing::Message() << to_string(spec) << ", " << bad);
      const Packed p = Packed::of(spec, normal_values(n * k, 2), n, k);
      if (bad == 0) {
        p.packed.values.as<std::uint8_t>()[150 * k + 7] = 0x7f;
      } else if (bad != 1) {
        // Of row 150, or of rows from 128 on and k below 128.
        p.packed.scales.as<float>()[format == Format::fp8_block ? 3 : 150] = bad;
      }
      std::string message;
      try {
        (void)prepare_packed(context, DType::bf16, {p.packed}, memory, rows);
      } catch (const Error& error) {
        message = error.what();
      }
      if (bad == 1) {
        EXPECT_EQ(message, "");
      } else {
        EXPECT_NE(message.find("matrices[0] holds a NaN or an infinite scale"), std::string::npos)
            << message;
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
#endif
