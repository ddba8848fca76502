// One token's rows that the experts' second product adds up, against combine() of the rows which it
// stores when it does not.
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

#include "core/convert.hpp"
#include "engine.hpp"
#include "format/plain.hpp"
#include "gemm/fused.hpp"
#include "gemm/on_hopper.hpp"
#include "shunt/combine.hpp"

namespace shunt {
namespace {

constexpr int groups = 12;

struct Case {
  FormatSpec format;
  RowFormat rows = RowFormat::as_dtype;
  DType dtype = DType::bf16;
  std::int64_t n = 512, k = 768;
  std::int64_t summed = 1;  // pairs that must be added up
  float times = 1;          // rows and weights are so much larger than usual
};

// Experts, their prepared weights and a token's pairs.
class Product {
 public:
  Product(const Context& context, const Case& c) : context_(context), c_(c), mirror_(context) {
    const float usual = c.times / std::sqrt(static_cast<float>(c.k));
    const auto values = [&](int g) {
      return normal_values(c.n * c.k, static_cast<unsigned>(g % 3 + 1), usual);
    };
    if (c.format == FormatSpec{}) {
      std::vector<std::vector<float>> plain;
      std::vector<Tensor> matrices;
      for (int g = 0; g < groups; ++g) plain.push_back(values(g));
      for (const auto& one : plain) matrices.push_back(view(one.data(), {c.n, c.k}));
      memory_ = context.allocate(prepared_bytes(context, c.dtype, groups, c.n, c.k));
      weights_ = prepare(context, c.dtype, matrices, memory_);
    } else {
      std::vector<Packed> packed;
      std::vector<PackedMatrix> matrices;
      for (int g = 0; g < groups; ++g) {
        packed.push_back(Packed::of(c.format, values(g), c.n, c.k));
      }
      for (const Packed& one : packed) matrices.push_back(one.packed);
      memory_ = context.allocate(
          prepared_bytes(context, c.dtype, c.format, groups, c.n, c.k, false, c.rows));
      weights_ = prepare_packed(context, c.dtype, matrices, memory_, c.rows);
    }
    bias_ = normal_values(groups * c.n, 5, 1);
    bias_there_ = mirror_.in(view(bias_.data(), {groups, c.n}));
  }

  // Pairs of these ids, those of no group among them.
  void check(const std::vector<std::int32_t>& ids, bool weighted, bool biased, bool more) {
    const auto pairs = static_cast<std::int64_t>(ids.size());
    std::vector<std::int32_t> inverse(ids.size(), -1), offsets(groups + 1, 0);
    std::int32_t rows = 0;
    for (std::int32_t g = 0; g < groups; ++g) {
      for (std::size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] == g) inverse[i] = rows++;
      }
    }
    const std::vector<float> x = normal_values(pairs * c_.k, 9, c_.times);
    std::vector<std::uint16_t> x16(x.size()), results(static_cast<std::size_t>(pairs * c_.n), 0);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x16[i] = c_.dtype == DType::bf16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i]);
    }
    const std::vector<float> weights = normal_values(pairs, 11, 1),
                             residual = normal_values(c_.n, 12, 1);
    std::vector<float> got(static_cast<std::size_t>(c_.n), -7), want(got);
    test::Mirror mirror(context_);
    MlpInput in{.rows = mirror.in(view(x16.data(), c_.dtype, {pairs, c_.k}, {})),
                .offsets = mirror.in(view(offsets.data(), {groups + 1})).as<const std::int32_t>(),
                .early = true,
                .bias = biased ? bias_there_.as<float>() : nullptr};
    in.chain.ids = mirror.in(view(ids.data(), {pairs})).as<const std::int32_t>();
    in.chain.pairs = static_cast<int>(pairs);
    in.chain.tokens = 1;
    const Tensor stored = view(results.data(), c_.dtype, {pairs, c_.n}, {});
    const Tensor out = mirror.out(stored);
    const Buffer workspace = context_.allocate(mlp_workspace_bytes(context_, weights_, pairs));
    ASSERT_TRUE(mlp_takes_pairs(context_, weights_, nullptr, in, out));
    mlp_gemm(context_, weights_, in, out, workspace);
    bool heard = false;
    in.chain.sum = {
        .out = mirror.out(view(got.data(), {c_.n})).data,
        .residual = more ? mirror.in(view(residual.data(), {c_.n})).data : nullptr,
        .weights = weighted ? mirror.in(view(weights.data(), {pairs})).as<float>() : nullptr,
        .heard = &heard};
    mlp_gemm(context_, weights_, in, out, workspace);
    // Where it costs nothing: of one pair always, of more where their blocks are small.
    EXPECT_TRUE(heard || pairs > c_.summed) << pairs << " pairs";
    if (!heard) return;
    mirror.fetch();
    CombineInputs parts{.rows = stored, .inverse = view(inverse.data(), {1, pairs})};
    if (weighted) parts.weights = view(weights.data(), {1, pairs});
    if (more) parts.residual = view(residual.data(), {1, c_.n});
    combine(cpu({.threads = 1}), {.slots = static_cast<int>(pairs), .weighted = weighted}, parts,
            view(want.data(), {1, c_.n}));
    // The rows are rounded as if they were stored. But k may be shared out in other parts, so that
    // a sum of f32 is another one and rounds to the other neighbour, seldom.
    const double ulp = c_.dtype == DType::bf16 ? 0x1p-7 : 0x1p-10;
    int others = 0, saturated = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      double size = 0;
      for (std::size_t p = 0; p < ids.size(); ++p) {
        if (inverse[p] < 0) continue;
        const std::uint16_t bits = results[static_cast<std::size_t>(inverse[p]) * got.size() + i];
        const float stored_x = c_.dtype == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
        saturated += std::abs(stored_x) == 65504;
        size += std::abs((weighted ? static_cast<double>(weights[p]) : 1.0) *
                         static_cast<double>(stored_x));
      }
      others += got[i] != want[i];
      ASSERT_LE(std::abs(static_cast<double>(got[i]) - static_cast<double>(want[i])), ulp * size)
          << pairs << " pairs, column " << i << (weighted ? ", weighted" : "")
          << (biased ? ", biased" : "") << (more ? ", residual" : "");
    }
    EXPECT_LE(others, c_.n / 50) << pairs << " pairs";
    EXPECT_TRUE(c_.times == 1 || saturated > c_.n / 20) << pairs << " pairs";
  }

 private:
  Context context_;
  Case c_;
  test::Mirror mirror_;
  Buffer memory_;
  PreparedWeights weights_;
  std::vector<float> bias_;
  Tensor bias_there_;
};

TEST(PairSum, EqualsCombine) {
  SHUNT_ON_HOPPER_ONLY();
  const Context context = cuda();
  std::mt19937 random(4);
  const RowFormat as_dtype = RowFormat::as_dtype, block = RowFormat::fp8_block;
  for (const Case& c : {Case{{}},
                        {{}, as_dtype, DType::f16, 1000, 264, 4},
                        {{Format::nvfp4}, as_dtype, DType::bf16, 2048, 768, 8},
                        {{Format::mxfp4}, as_dtype, DType::bf16, 720, 2880},
                        {{Format::nvfp4}, as_dtype, DType::f16, 200, 264, 8},
                        {{Format::sparse_nvfp4}, as_dtype, DType::bf16, 2048, 768, 8},
                        {{Format::int4, 128}, as_dtype, DType::f16, 2048, 768, 8},
                        {{Format::dense3}, as_dtype, DType::bf16, 2048, 768, 2},
                        {{Format::dense3}, as_dtype, DType::f16, 720, 2880, 0},
                        {{Format::int8}},
                        {{Format::mxfp8}},
                        {{Format::fp8_block}},
                        {{Format::fp8_block}, block},
                        {{Format::fp8_block}, block, DType::bf16, 7168, 512}}) {
    SCOPED_TRACE(::testing::Message() << to_string(c.format) << ' ' << c.n << " x " << c.k);
    Product product(context, c);
    for (std::size_t pairs = 1; pairs <= 8; ++pairs) {
      std::vector<std::int32_t> ids(groups);
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random);
      ids.resize(pairs);
      product.check(ids, true, false, false);
      product.check(ids, pairs % 2 == 0, pairs % 3 == 0, pairs % 2 != 0);
      for (std::size_t i = 0; i < pairs; i += 2) ids[i] = i % 4 == 0 ? -1 : groups + 3;
      product.check(ids, true, true, false);
      product.check(std::vector<std::int32_t>(pairs, -1), true, false, pairs % 2 == 0);
    }
  }
}

// Where results are beyond f16, what is added up saturates as what would have been stored.
TEST(PairSum, OfResultsBeyondF16) {
  SHUNT_ON_HOPPER_ONLY();
  const Context context = cuda();
  const RowFormat as_dtype = RowFormat::as_dtype;
  for (const Case& c : {Case{{}, as_dtype, DType::f16, 1000, 264, 4, 300},
                        {{Format::nvfp4}, as_dtype, DType::f16, 200, 264, 8, 300},
                        {{Format::int4, 128}, as_dtype, DType::f16, 2048, 768, 8, 300},
                        {{Format::int8}, as_dtype, DType::f16, 512, 768, 1, 300}}) {
    SCOPED_TRACE(::testing::Message() << to_string(c.format) << ' ' << c.n << " x " << c.k);
    Product product(context, c);
    for (const std::int32_t pairs : {1, 2, 5, 8}) {
      std::vector<std::int32_t> ids;
      for (std::int32_t pair = 0; pair < pairs; ++pair) ids.push_back((pair * 5 + 2) % groups);
      product.check(ids, true, false, false);
      product.check(ids, pairs % 2 == 0, true, pairs == 5);
    }
  }
}

}  // namespace
}  // namespace shunt
