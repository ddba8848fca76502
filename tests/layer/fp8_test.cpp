// Layers whose experts are computed in fp8, or in NVFP4, against double precision over the same
// rounded weights and rows.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/convert.hpp"
#include "core/quantise.hpp"
#include "engine.hpp"
#include "layer/random_layer.hpp"
#include "shunt/format.hpp"

namespace shunt {
namespace {

using testing::RandomLayer;
using testing::small_layer;
using testing::weights_on_the_input;

constexpr LayerOptions fp8{
    .dtype = DType::bf16, .format = {.format = Format::fp8_block}, .rows = RowFormat::fp8_block};
constexpr LayerOptions of_tokens{
    .dtype = DType::bf16, .format = {.format = Format::fp8_channel}, .rows = RowFormat::fp8_token};

constexpr LayerOptions fp4{
    .dtype = DType::bf16, .format = {.format = Format::nvfp4}, .rows = RowFormat::nvfp4};

TEST(LayerInFp8, IsRefusedWhereItIsNotComputed) {
  const LayerSpec spec = small_layer({.experts = 8, .top_k = 2, .renormalize = true});
  const Support on_cpu = supports(spec, fp8, Device{});
  EXPECT_FALSE(on_cpu);
  EXPECT_NE(on_cpu.reason.find("rows is fp8_block with format fp8_block: must be as_dtype"),
            std::string::npos)
      << on_cpu.reason;
  EXPECT_FALSE(supports(spec, fp4, Device{}));
  LayerOptions one = fp8;
  one.rows = RowFormat::fp8_token;
  EXPECT_FALSE(supports(spec, one, Device{DeviceType::cuda, 0}));
  EXPECT_FALSE(supports(spec, of_tokens, Device{}));
  one = of_tokens;
  one.dtype = DType::f32;
  EXPECT_FALSE(supports(spec, one, Device{DeviceType::cuda, 0}));
  const Support wide = supports(spec, one, Device{DeviceType::cuda, 0});
  const Support narrow = supports(small_layer({.experts = 8, .top_k = 2}, 64, 9), of_tokens,
                                  Device{DeviceType::cuda, 0});
  EXPECT_FALSE(narrow);
  if (supports(spec, of_tokens, Device{DeviceType::cuda, 0})) {  // a build with CUDA
    EXPECT_NE(narrow.reason.find("intermediate is 9"), std::string::npos) << narrow.reason;
    EXPECT_NE(wide.reason.find("dtype is f32, with rows fp8_token of format fp8_channel"),
              std::string::npos)
        << wide.reason;
  }
  one = fp8;
  one.in_place = true;
  const Support in_place = supports(spec, one, Device{DeviceType::cuda, 0});
  EXPECT_FALSE(in_place);
  if (supports(spec, fp8, Device{DeviceType::cuda, 0})) {
    EXPECT_NE(in_place.reason.find("in_place: must be false"), std::string::npos)
        << in_place.reason;
  }
  one = fp8;
  one.fast_accumulation = true;
  const Support fast = supports(spec, one, Device{DeviceType::cuda, 0});
  EXPECT_FALSE(fast);
  if (supports(spec, fp8, Device{DeviceType::cuda, 0})) {
    EXPECT_NE(fast.reason.find("fast_accumulation is true with rows fp8_block"), std::string::npos)
        << fast.reason;
    one = of_tokens;
    one.fast_accumulation = one.batch_invariant = true;
    const Support both = supports(spec, one, Device{DeviceType::cuda, 0});
    EXPECT_NE(both.reason.find("fast_accumulation is true with batch_invariant"), std::string::npos)
        << both.reason;
  }
  one = fp8;
  one.format.format = Format::nvfp4;
  EXPECT_FALSE(supports(spec, one, Device{DeviceType::cuda, 0}));
}

// x as a matrix of one row in NVFP4, decoded.
std::vector<double> in_fp4(const std::vector<double>& x) {
  std::vector<float> row(x.begin(), x.end());
  const auto k = static_cast<std::int64_t>(row.size());
  const Buffer memory = cpu({.threads = 1}).allocate(packed_bytes(fp4.format, 1, k));
  unpack(pack(fp4.format, view(row.data(), {1, k}), memory), view(row.data(), {1, k}));
  return {row.begin(), row.end()};
}

// x as e4m3 with a scale for 128 numbers or for all, decoded.
std::vector<double> in_fp8(RowFormat kind, const std::vector<double>& x) {
  std::vector<double> y(x.size());
  const std::size_t block = kind == RowFormat::fp8_token ? x.size() : 128;
  for (std::size_t begin = 0; begin < x.size(); begin += block) {
    const std::size_t end = std::min(x.size(), begin + block);
    float most = 0;
    for (std::size_t i = begin; i < end; ++i)
      most = std::max(most, std::abs(static_cast<float>(x[i])));
    const Fp8Scale scale = fp8_scale(most, 0, false);
    for (std::size_t i = begin; i < end; ++i) {
      y[i] = static_cast<double>(e4m3_to_f32(to_e4m3(static_cast<float>(x[i]) * scale.factor))) *
             static_cast<double>(scale.scale);
    }
  }
  return y;
}

struct Unpacked {
  std::vector<float> data;
  std::int64_t n = 0, k = 0;
  Unpacked(const FormatSpec& format, const Tensor& matrix)
      : n(matrix.shape[0]), k(matrix.shape[1]) {
    data.resize(static_cast<std::size_t>(n * k));
    const Buffer memory = cpu().allocate(packed_bytes(format, n, k));
    unpack(pack(format, matrix, memory), view(data.data(), {n, k}));
  }
  std::vector<double> times(const std::vector<double>& x) const {
    std::vector<double> y(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j < k; ++j) {
        y[static_cast<std::size_t>(i)] +=
            static_cast<double>(data[static_cast<std::size_t>(i * k + j)]) *
            x[static_cast<std::size_t>(j)];
      }
    }
    return y;
  }
};

// Sums in f32 next to a boundary of bf16 or e4m3 may round to the other side: an eighth of a number
// at most, and of few of them. So each result is within an eighth of its terms, and all together
// within a hundredth, and what one such number of those of a token is worth. e2m1: half a number,
// and a tenth.
void check(const LayerOptions& options, const LayerSpec& spec, std::int64_t tokens, unsigned seed) {
  const bool four_bits = options.rows == fp4.rows;
  const auto rounded = [&](const std::vector<double>& row) {
    return four_bits ? in_fp4(row) : in_fp8(options.rows, row);
  };
  SCOPED_TRACE(describe(spec) + ", tokens " + std::to_string(tokens) + ", " +
               to_string(options.format));
  const Context context = cuda();
  RandomLayer made(spec, seed);
  std::vector<Unpacked> gate, up, down;  // of the shared expert last
  const auto unpacked = [&](const ExpertWeights& weights) {
    for (std::size_t e = 0; e < weights.up.size(); ++e) {
      gate.emplace_back(options.format, weights.gate[e]);
      up.emplace_back(options.format, weights.up[e]);
      down.emplace_back(options.format, weights.down[e]);
    }
  };
  unpacked(made.weights.experts);
  if (spec.shared.intermediate > 0) {
    unpacked(made.weights.shared);
    made.pack(made.weights.shared, options.format, options.format);
  }
  const Tensor x = made.hidden_states(tokens, DType::bf16);
  const Layer layer(spec, made.weights, context, options);
  std::vector<float> y(static_cast<std::size_t>(tokens * spec.hidden));
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * spec.route.top_k));
  std::vector<float> weights(ids.size());
  test::Mirror mirror(context);
  const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
  const LayerOutputs out{.output = mirror.out(view(y.data(), {tokens, spec.hidden})),
                         .ids = mirror.out(view(ids.data(), {tokens, spec.route.top_k})),
                         .weights = mirror.out(view(weights.data(), {tokens, spec.route.top_k}))};
  layer.forward({.hidden = mirror.in(x)}, out, workspace);
  mirror.fetch();
  const std::vector<float> first(y.begin(), y.end());
  mirror.poison();
  layer.forward({.hidden = mirror.in(x)}, out, workspace);
  mirror.fetch();
  EXPECT_EQ(y, first);

  // Of the experts or of the shared one, which may be most of the sum.
  std::int64_t least_inner = spec.experts.intermediate * spec.route.top_k;
  if (spec.shared.intermediate > 0) least_inner = std::min(least_inner, spec.shared.intermediate);
  const auto inner = static_cast<double>(least_inner);
  double error = 0, size = 0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<double> row, want(static_cast<std::size_t>(spec.hidden)), bound(want.size());
    for (std::int64_t i = 0; i < spec.hidden; ++i) {
      row.push_back(static_cast<double>(load_f32(x.data, x.dtype, t * spec.hidden + i)));
    }
    const std::vector<double> states = row;
    // A row with one scale is weighed before it is rounded.
    const bool early = spec.route.weight_on_input && options.rows == RowFormat::fp8_token;
    if (early) {
      const float weight = weights[static_cast<std::size_t>(t)];
      for (double& number : row) number = static_cast<double>(static_cast<float>(number) * weight);
    }
    const std::vector<double> of_experts = rounded(row), of_shared = rounded(states);
    const auto add = [&](const std::vector<double>& q, std::size_t e, double before, double after) {
      std::vector<double> a = gate[e].times(q), b = up[e].times(q);
      for (std::size_t i = 0; i < a.size(); ++i) a[i] *= before, b[i] *= before;
      std::vector<double> h(a.size());
      for (std::size_t i = 0; i < h.size(); ++i) {
        h[i] = static_cast<double>(
            bf16_to_f32(f32_to_bf16(static_cast<float>(a[i] / (1 + std::exp(-a[i])) * b[i]))));
      }
      const std::vector<double> p = rounded(h), z = down[e].times(p);
      for (std::size_t i = 0; i < want.size(); ++i) {
        want[i] += after * z[i];
        double terms = 0;
        for (std::size_t j = 0; j < p.size(); ++j) {
          terms += std::abs(static_cast<double>(down[e].data[i * p.size() + j]) * p[j]);
        }
        bound[i] += after * terms / (four_bits ? 2 : 8) + 1e-5;
      }
    };
    for (int s = 0; s < spec.route.top_k; ++s) {
      const auto pair = static_cast<std::size_t>(t * spec.route.top_k + s);
      const auto weight = static_cast<double>(weights[pair]);
      add(of_experts, static_cast<std::size_t>(ids[pair]),
          spec.route.weight_on_input && !early ? weight : 1,
          spec.route.weight_on_input ? 1 : weight);
    }
    if (spec.shared.intermediate > 0) {
      add(of_shared, gate.size() - 1, 1, static_cast<double>(spec.shared.scale));
    }
    double row_error = 0, row_size = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const auto got = static_cast<double>(y[static_cast<std::size_t>(t * spec.hidden) + i]);
      ASSERT_NEAR(got, want[i], bound[i]) << "token " << t << ", column " << i;
      row_error += (got - want[i]) * (got - want[i]);
      row_size += want[i] * want[i];
    }
    // A number on the other side of a boundary is worth an eighth of itself, and a row has few.
    ASSERT_LT(std::sqrt(row_error / row_size), four_bits ? 0.3 : 0.01 + 1 / std::sqrt(inner))
        << "token " << t;
    error += row_error;
    size += row_size;
  }
  const double numbers = inner * static_cast<double>(tokens);
  EXPECT_LT(std::sqrt(error / size), four_bits ? 0.1 : 0.01 + 0.125 / std::sqrt(numbers));
}

TEST(LayerInFp8, EqualsDoubleOverTheSameRoundedNumbers) {
  if (!test::on_gpu()) GTEST_SKIP() << "fp8 is computed on a GPU";
  const RouteSpec eight{.experts = 8, .top_k = 2, .renormalize = true};
  for (const std::int64_t tokens : {1, 3, 40, 700}) {
    check(fp8, small_layer(eight, 256, 384), tokens, 1);
    check(fp8, small_layer({.experts = 3, .top_k = 2, .renormalize = true}, 200, 136), tokens, 2);
  }
  // On an H200 rows of 700 tokens and these are rounded between the products ..
  check(fp8, small_layer(eight, 264, 100), 2000, 3);
  // .. and by the first.
  check(fp8, small_layer({.experts = 2, .top_k = 2, .renormalize = true}, 256, 384), 2000, 4);
}

// Of few tokens sums are weighed, of many rows before they are rounded.
TEST(LayerInFp8, WithWeightsOnTheInput) {
  if (!test::on_gpu()) GTEST_SKIP() << "fp8 is computed on a GPU";
  for (const std::int64_t tokens : {1, 3, 8, 20, 40, 700}) {
    check(fp8, small_layer(weights_on_the_input(1), 256, 384), tokens, 1);
    check(of_tokens, small_layer(weights_on_the_input(1), 200, 138), tokens, 2);
  }
}

TEST(LayerInFp8, OrWithAScaleARow) {
  if (!test::on_gpu()) GTEST_SKIP() << "fp8 is computed on a GPU";
  const RouteSpec eight{.experts = 8, .top_k = 2, .renormalize = true};
  LayerOptions of_matrices = of_tokens;
  of_matrices.format.format = Format::fp8_tensor;
  for (const std::int64_t tokens : {1, 3, 40, 700}) {
    check(of_tokens, small_layer(eight, 256, 384), tokens, 1);
    check(of_tokens, small_layer({.experts = 3, .top_k = 2, .renormalize = true}, 200, 138), tokens,
          2);
    check(of_matrices, small_layer(eight, 264, 100), tokens, 3);
  }
  check(of_matrices, small_layer({.experts = 2, .top_k = 2, .renormalize = true}, 256, 384), 2000,
        4);
  LayerOptions fast = of_tokens;
  fast.fast_accumulation = true;
  check(fast, small_layer(eight, 264, 384), 700, 1);
  check(fast, small_layer({.experts = 4, .top_k = 1}, 264, 384), 700, 1);
  check(fast, small_layer(eight, 264, 384), 3, 1);
}

// A shared expert of the same format has its rows rounded as the others', in every way: on the way,
// between its products and by the first.
TEST(LayerInFp8, ASharedExpertToo) {
  if (!test::on_gpu()) GTEST_SKIP() << "fp8 is computed on a GPU";
  LayerOptions of_matrices = of_tokens;
  of_matrices.format.format = Format::fp8_tensor;
  for (const RouteSpec& route :
       {RouteSpec{.experts = 8, .top_k = 2, .renormalize = true}, weights_on_the_input(1)}) {
    for (const std::int64_t intermediate : {384, 264, 100}) {
      LayerSpec spec = small_layer(route, 256, 384);
      spec.shared = {.intermediate = intermediate, .scale = 0.5f};
      for (const std::int64_t tokens : {1, 3, 40, 700, 3000}) {
        if (tokens == 3000 && route.top_k == 2) continue;  // takes long on the host
        check(fp8, spec, tokens, 1);
        if (tokens <= 700) check(of_tokens, spec, tokens, 2);
      }
      check(of_matrices, spec, 40, 3);
    }
  }
}

// One of another format, or plain, has its rows in 16 bits.
TEST(LayerInFp8, ASharedExpertOfAnotherFormatKeepsItsRows) {
  if (!test::on_gpu()) GTEST_SKIP() << "fp8 is computed on a GPU";
  LayerSpec spec = small_layer({.experts = 8, .top_k = 2, .renormalize = true}, 256, 384);
  spec.shared = {.intermediate = 264};
  const auto words = [&](const FormatSpec& format) {
    RandomLayer made(spec, 1);
    if (format != FormatSpec{}) made.pack(made.weights.shared, format, format);
    const std::string all = Layer(spec, made.weights, cuda(), fp8).explain(700);
    return all.substr(all.find("  shared"));
  };
  EXPECT_NE(words({Format::fp8_block}).find("rows to fp8"), std::string::npos);
  for (const FormatSpec& format :
       {FormatSpec{}, FormatSpec{Format::fp8_channel}, FormatSpec{Format::nvfp4}}) {
    EXPECT_EQ(words(format).find("rows to fp8"), std::string::npos) << to_string(format);
  }
}

// Blackwell alone has kernels; others refuse by name when weights are prepared.
TEST(LayerInFp4, EqualsDoubleOverTheSameRoundedNumbersOrIsRefused) {
  if (!test::on_gpu()) GTEST_SKIP() << "rows in nvfp4 are multiplied on a GPU";
  const LayerSpec spec = small_layer({.experts = 8, .top_k = 2, .renormalize = true}, 256, 384);
  try {
    RandomLayer made(spec, 1);
    (void)Layer(spec, made.weights, cuda(), fp4);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rows in nvfp4 have no kernel"), std::string::npos)
        << error.what();
    return;
  }
  for (const std::int64_t tokens : {1, 3, 40, 700}) {
    check(fp4, spec, tokens, 1);
    check(fp4, small_layer({.experts = 3, .top_k = 2, .renormalize = true}, 200, 136), tokens, 2);
  }
}

}  // namespace
}  // namespace shunt
