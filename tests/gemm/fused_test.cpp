// The layer's products: gather, scale and activation fused into the GEMM.
#include "gemm/fused.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "engines.hpp"
#include "gemm/gemm_data.hpp"

namespace shunt {
namespace {

using test::Array;
using test::random_array;

constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f16};

class Fused : public testing::TestWithParam<test::Engine> {};

struct Setup {
  int groups = 5, slots = 2;
  std::int64_t tokens = 6, hidden = 70, inner = 41;
  DType dtype = DType::f32, input = DType::f32;
  ActivationSpec activation{};
  bool scaled = false, permuted = true, bias = true;
};

struct Expert {
  Setup s;
  std::vector<std::int32_t> offsets = {0, 0, 1, 8, 8, 11};
  std::vector<std::int32_t> permutation = {3, 11, 0, 7, 2, 5, 1, 9, 4, 8, 10, 6};
  std::vector<float> scale;
  Array x, gate, up, bias;
  explicit Expert(const Setup& setup)
      : s(setup),
        x(random_array(s.input, {s.permuted ? s.tokens : 12, s.hidden}, 1)),
        gate(random_array(DType::bf16, {s.groups, s.inner, s.hidden}, 2)),
        up(random_array(DType::f32, {s.groups, s.inner, s.hidden}, 3)),
        bias(random_array(DType::f32, {s.groups, s.activation.gated ? 2 * s.inner : s.inner}, 4)) {
    for (int i = 0; i < 12; ++i) scale.push_back(0.25F + 0.1F * static_cast<float>(i));
  }
  MlpInput input(test::Mirror& mirror) const {
    const auto floats = [&](const float* data, std::int64_t size) {
      return mirror.in(view(data, {size})).as<const float>();
    };
    const auto ints = [&](const std::vector<std::int32_t>& data) {
      return mirror.in(view(data.data(), {static_cast<std::int64_t>(data.size())}))
          .as<const std::int32_t>();
    };
    return {.rows = mirror.in(x.tensor),
            .offsets = ints(offsets),
            .permutation = s.permuted ? ints(permutation) : nullptr,
            .slots = s.slots,
            .row_scale = s.scaled ? floats(scale.data(), 12) : nullptr,
            .bias = s.bias ? mirror.in(bias.tensor).as<const float>() : nullptr};
  }
  static std::vector<Tensor> list(const Array& a) {
    std::vector<Tensor> tensors;
    for (std::int64_t g = 0; g < a.tensor.shape[0]; ++g) tensors.push_back(a.tensor[g]);
    return tensors;
  }
  Array fused(const Context& context) const {
    const bool gated = s.activation.gated;
    // gate and up must be of one dtype to be prepared together.
    Array gate_f32(DType::f32, {s.groups, s.inner, s.hidden});
    for (std::int64_t i = 0; i < gate.tensor.elements(); ++i) gate_f32.set(i, gate.get(i));
    const Buffer memory = context.allocate(
        prepared_bytes(context, s.dtype, s.groups, gated ? 2 * s.inner : s.inner, s.hidden, gated));
    const PreparedWeights w =
        gated ? prepare_paired(context, s.dtype, list(gate_f32), list(up), memory)
              : prepare(context, s.dtype, list(up), memory);
    Array out(s.dtype, {12, s.inner});
    for (std::int64_t i = 0; i < out.tensor.elements(); ++i) out.set(i, 9);
    const std::int64_t source = s.permuted && !s.scaled ? s.tokens : -1;
    const Buffer workspace = context.allocate(mlp_workspace_bytes(context, w, 12, source));
    test::Mirror mirror(context);
    mlp_gate_up(context, w, s.activation, input(mirror), mirror.out(out.tensor), workspace);
    mirror.fetch();
    return out;
  }
  // The same by the stages: gathered rows, grouped GEMM to f32, activation. On a GPU a row's weight
  // multiplies its sums, before the bias.
  Array staged(const Context& context) const {
    const bool gated = s.activation.gated;
    const bool weighs_sums = s.scaled && context.device().type == DeviceType::cuda;
    const std::int64_t n = gated ? 2 * s.inner : s.inner;
    Array rows(DType::f32, {12, s.hidden}), sums(DType::f32, {12, n}), out(s.dtype, {12, s.inner});
    for (std::int64_t r = 0; r < 12; ++r) {
      const std::int64_t token =
          s.permuted ? permutation[static_cast<std::size_t>(r)] / s.slots : r;
      const float factor = s.scaled && !weighs_sums ? scale[static_cast<std::size_t>(r)] : 1.0F;
      for (std::int64_t i = 0; i < s.hidden; ++i) {
        rows.set(r * s.hidden + i, factor * x.get(token * s.hidden + i));
      }
    }
    Array weights(DType::f32, {s.groups, n, s.hidden});
    for (std::int64_t g = 0; g < s.groups; ++g) {
      for (std::int64_t i = 0; i < s.inner * s.hidden; ++i) {
        const std::int64_t at = g * s.inner * s.hidden + i;
        if (gated) weights.set(g * n * s.hidden + i, gate.get(at));
        weights.set(g * n * s.hidden + (gated ? s.inner * s.hidden : 0) + i, up.get(at));
      }
    }
    const GroupedGemmSpec spec{.groups = s.groups,
                               .n = n,
                               .k = s.hidden,
                               .dtype = s.dtype,
                               .bias = s.bias && !weighs_sums,
                               .prepared = false};
    const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, spec, 12));
    for (std::int64_t i = 0; i < sums.tensor.elements(); ++i) sums.set(i, 0);
    test::Mirror mirror(context);
    grouped_gemm(context, spec,
                 {.rows = mirror.in(rows.tensor),
                  .offsets = mirror.in(view(offsets.data(), {s.groups + 1})),
                  .weights = mirror.in(weights.tensor),
                  .bias = spec.bias ? mirror.in(bias.tensor) : Tensor{}},
                 mirror.out(sums.tensor), workspace);
    mirror.fetch();
    for (std::int64_t group = 0; weighs_sums && group < s.groups; ++group) {
      const auto at = static_cast<std::size_t>(group);
      for (std::int64_t r = offsets[at]; r < offsets[at + 1]; ++r) {
        for (std::int64_t i = 0; i < n; ++i) {
          const float weighed = scale[static_cast<std::size_t>(r)] * sums.get(r * n + i);
          sums.set(r * n + i, s.bias ? weighed + bias.get(group * n + i) : weighed);
        }
      }
    }
    Tensor g = sums.tensor, u = sums.tensor;
    g.shape[1] = u.shape[1] = s.inner;
    if (gated) u.data = u.as<float>() + s.inner;
    test::Mirror second(context);
    if (gated) g = second.in(g);
    activate(context, s.activation, gated ? g : Tensor{}, second.in(u), second.out(out.tensor));
    second.fetch();
    for (std::int64_t i = offsets.back() * s.inner; i < 12 * s.inner; ++i) out.set(i, 9);
    return out;
  }
};

bool same_bits(const Array& a, const Array& b) {
  return std::memcmp(a.tensor.data, b.tensor.data, static_cast<std::size_t>(a.tensor.bytes())) == 0;
}

// Fusion changes no bit: the stages are checked against their references on their own.
TEST_P(Fused, IsTheStagesBitForBit) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    for (const DType input : dtypes) {
      for (const bool scaled : {false, true}) {
        for (const bool permuted : {false, true}) {
          const Expert e({.dtype = dtype,
                          .input = input,
                          .scaled = scaled,
                          .permuted = permuted,
                          .bias = scaled != permuted});
          EXPECT_TRUE(same_bits(e.fused(context), e.staged(context)))
              << to_string(dtype) << " " << to_string(input) << scaled << permuted;
        }
      }
    }
  }
}

TEST_P(Fused, EveryWidthAndActivation) {
  const Context context = test::context_of(GetParam(), 2);
  const ActivationSpec gpt_oss{.alpha = 1.702F, .limit = 7, .up_offset = 1};
  const ActivationSpec step{.limit = 0.5F, .limit_on = LimitOn::output};
  const ActivationSpec relu2{.kind = Activation::relu2, .gated = false};
  const ActivationSpec geglu{.kind = Activation::gelu};
  for (const ActivationSpec& activation : {gpt_oss, step, relu2, geglu}) {
    for (const std::int64_t inner : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100}) {
      const Expert e({.hidden = inner + 1,
                      .inner = inner,
                      .dtype = dtypes[inner % 3],
                      .activation = activation});
      EXPECT_TRUE(same_bits(e.fused(context), e.staged(context)))
          << describe(activation) << " " << inner;
    }
  }
}

TEST_P(Fused, FewerRowsThanTokens) {
  const Context context = test::context_of(GetParam(), 1);
  for (const DType dtype : dtypes) {
    Expert e({.slots = 1, .tokens = 200, .dtype = dtype, .input = DType::f16});
    for (std::int32_t& pair : e.permutation) pair = 199 - 3 * pair;
    EXPECT_TRUE(same_bits(e.fused(context), e.staged(context)));
  }
}

TEST_P(Fused, SameBitsForAnyNumberOfThreads) {
  for (const DType dtype : dtypes) {
    const Expert e({.hidden = 300, .inner = 90, .dtype = dtype});
    const Array first = e.fused(test::context_of(GetParam(), 1));
    for (const int threads : {2, 3, 4}) {
      EXPECT_TRUE(same_bits(e.fused(test::context_of(GetParam(), threads)), first));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Fused, testing::ValuesIn(test::all_engines()),
                         [](const auto& set) { return test::engine_name(set.param); });

}  // namespace
}  // namespace shunt
