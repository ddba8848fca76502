// A layer in f16 on a GPU whose hidden rows, experts' results and outputs are beyond f16 here and
// there: each saturates where it is rounded (LayerOptions::dtype), in double likewise.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "engine.hpp"
#include "format/plain.hpp"
#include "layer/random_layer.hpp"
#include "layer/run_layer.hpp"

namespace shunt {
namespace {

using testing::RandomLayer;
using testing::Result;

constexpr double largest = 65504;

// A matrix in double.
struct Numbers {
  std::int64_t n = 0, k = 0;
  std::vector<double> all;

  explicit Numbers(const Tensor& matrix) : n(matrix.shape[0]), k(matrix.shape[1]) {
    for (std::int64_t i = 0; i < n * k; ++i) {
      all.push_back(static_cast<double>(load_f32(matrix.data, matrix.dtype, i)));
    }
  }
  explicit Numbers(const PackedMatrix& matrix) : n(matrix.n), k(matrix.k) {
    for (std::int64_t i = 0; i < n * k; ++i) all.push_back(plain_weight(matrix, i / k, i % k));
  }
};
struct Values {
  std::vector<double> x, off;  // and by how much each may be off
};

// W x as sums in f32 have it.
Values times(const Numbers& w, const Values& in) {
  Values y;
  for (std::int64_t r = 0; r < w.n; ++r) {
    double sum = 0, magnitude = 0, off = 0;
    for (std::int64_t i = 0; i < w.k; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double weight = w.all[static_cast<std::size_t>(r * w.k + i)];
      sum += weight * in.x[at];
      magnitude += std::abs(weight * in.x[at]);
      off += std::abs(weight) * in.off[at];
    }
    y.x.push_back(sum);
    y.off.push_back(off + (2 * static_cast<double>(w.k + 2) * 0x1p-24 + 1e-6) * magnitude);
  }
  return y;
}

// Rounded to f16, which saturates; how many do.
int round_to_f16(Values& values) {
  int saturated = 0;
  for (std::size_t i = 0; i < values.x.size(); ++i) {
    saturated += std::abs(values.x[i]) > largest;
    values.x[i] = std::clamp(values.x[i], -largest, largest);
    values.off[i] += 0x1.01p-11 * std::abs(values.x[i]) + 0x1p-25;
  }
  return saturated;
}

TEST(LayerInF16, SaturatesWhereRowsAreRounded) {
  if (!test::on_gpu()) GTEST_SKIP() << "the CPU engine keeps experts' results in f32";
  const Context context = cuda();
  LayerSpec spec =
      testing::small_layer({.experts = 8, .top_k = 2, .renormalize = true, .scale = 2}, 256, 384);
  const auto hidden = static_cast<std::size_t>(spec.hidden);
  for (const FormatSpec& format : {FormatSpec{}, FormatSpec{Format::nvfp4}}) {
    RandomLayer made(spec, 7, DType::f16);
    std::vector<Numbers> gate, up, down;
    const ExpertWeights& experts = made.weights.experts;
    if (format == FormatSpec{}) {
      for (const Tensor& one : experts.gate) gate.emplace_back(one);
      for (const Tensor& one : experts.up) up.emplace_back(one);
      for (const Tensor& one : experts.down) down.emplace_back(one);
    } else {
      made.pack(made.weights.experts, format, format);
      for (const PackedMatrix& one : experts.packed_gate) gate.emplace_back(one);
      for (const PackedMatrix& one : experts.packed_up) up.emplace_back(one);
      for (const PackedMatrix& one : experts.packed_down) down.emplace_back(one);
    }
    const Layer layer(spec, made.weights, context, {.dtype = DType::f16});
    for (const std::int64_t tokens : {1, 3, 40, 300}) {
      SCOPED_TRACE(to_string(format) + ", " + std::to_string(tokens) + " tokens");
      // Gates and ups of about 400, hidden rows of about 400^2.
      const Tensor states = made.hidden_states(tokens, DType::f16);
      for (std::int64_t i = 0; i < states.elements(); ++i) {
        store_f32(states.data, DType::f16, i, 200 * load_f32(states.data, DType::f16, i));
      }
      const Result got = testing::run(context, layer, {.hidden = states});
      // The same into f16.
      std::vector<std::uint16_t> halves(got.output.size());
      test::Mirror mirror(context);
      const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
      const Tensor to = mirror.out(view(halves.data(), DType::f16, {tokens, spec.hidden}));
      mirror.poison();
      layer.forward({.hidden = mirror.in(states)}, {.output = to}, workspace);
      mirror.fetch();

      int rows_saturated = 0, results_saturated = 0, outputs_saturated = 0;
      double error = 0, size = 0;
      for (std::int64_t t = 0; t < tokens; t += tokens / 50 + 1) {
        Values x;
        for (std::int64_t i = 0; i < spec.hidden; ++i) {
          x.x.push_back(
              static_cast<double>(load_f32(states.data, DType::f16, t * spec.hidden + i)));
          x.off.push_back(0);
        }
        Values y{std::vector<double>(hidden), std::vector<double>(hidden)};
        for (int slot = 0; slot < spec.route.top_k; ++slot) {
          const auto pair = static_cast<std::size_t>(t * spec.route.top_k + slot);
          const auto e = static_cast<std::size_t>(got.ids[pair]);
          const auto weight = static_cast<double>(got.weights[pair]);
          const Values a = times(gate[e], x), b = times(up[e], x);
          Values h;
          for (std::size_t i = 0; i < a.x.size(); ++i) {
            const double silu = a.x[i] / (1 + std::exp(-a.x[i]));
            h.x.push_back(silu * b.x[i]);
            // The slope of SiLU is 1.1 at most; what it is computed to.
            h.off.push_back(1.1 * a.off[i] * (std::abs(b.x[i]) + b.off[i]) +
                            std::abs(silu) * b.off[i] + 1e-6 * std::abs(h.x.back()));
          }
          rows_saturated += round_to_f16(h);
          Values z = times(down[e], h);
          results_saturated += round_to_f16(z);
          for (std::size_t i = 0; i < hidden; ++i) {
            y.x[i] += weight * z.x[i];
            y.off[i] += std::abs(weight) * (z.off[i] + 1e-6 * std::abs(z.x[i]));
          }
        }
        for (std::size_t i = 0; i < hidden; ++i) {
          const std::size_t at = static_cast<std::size_t>(t) * hidden + i;
          const auto output = static_cast<double>(got.output[at]);
          ASSERT_NEAR(output, y.x[i], y.off[i]) << "token " << t << ", column " << i;
          error += (output - y.x[i]) * (output - y.x[i]);
          size += y.x[i] * y.x[i];
          const auto half = static_cast<double>(f16_to_f32(halves[at]));
          const double fits = std::clamp(y.x[i], -largest, largest);
          ASSERT_NEAR(half, fits, y.off[i] + 0x1.01p-11 * std::abs(fits))
              << "token " << t << ", column " << i;
          if (std::abs(y.x[i]) - y.off[i] < 65520) continue;  // what is rounded to the largest
          ASSERT_EQ(half, y.x[i] > 0 ? largest : -largest) << "token " << t << ", column " << i;
          ++outputs_saturated;
        }
      }
      // Each rounding moves a number by 2^-11 of itself at most, and what comes behind by no more
      // of it, in the mean.
      EXPECT_LT(std::sqrt(error / size), 3 * 0x1p-11);
      EXPECT_GT(rows_saturated, 50);
      EXPECT_GT(results_saturated, 5);
      EXPECT_GT(outputs_saturated, 5);
    }
  }
}

}  // namespace
}  // namespace shunt
