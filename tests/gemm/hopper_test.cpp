// Every kernel and tile that a plan may choose on Hopper, those of older GPUs among them, against
// sums in double precision: ragged and empty groups, tails of every side, gathered rows, each
// epilogue. Sizes that would never be given to a kernel are given to it here.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/hopper_product.hpp"
#include "gemm/on_hopper.hpp"
#include "gemm/rule_reference.hpp"
#include "shunt/gemm.hpp"
#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"

namespace shunt {
namespace {

using cpu_engine::ActivationRule;
using cuda_engine::ProductPlan;
using test::Array;

struct Problem {
  DType dtype = DType::bf16;
  std::int64_t n = 0, k = 0;
  std::vector<std::int32_t> sizes;  // rows of each group
  DType out = DType::bf16;
  bool bias = false;
  bool paired = false;
  ActivationRule rule = {.kind = ActivationRule::identity, .gated = false};
  int gathered_from = 0;     // rows of the source; 0: not gathered
  bool holes = false;        // some of them are no row's: zeros
  std::int64_t out_gap = 0;  // elements between rows of out
};

class Made {
 public:
  Made(const Context& context, const Problem& problem) : p(problem), context_(context) {
    const auto groups = static_cast<int>(p.sizes.size());
    offsets.push_back(0);
    for (const auto size : p.sizes) offsets.push_back(offsets.back() + size);
    rows_ = offsets.back();
    const std::int64_t pitch = (p.k + 7) / 8 * 8 + 8;
    source_rows_ = p.gathered_from > 0 ? p.gathered_from : rows_ + 3;
    x_ = std::make_unique<Array>(test::random_array(p.dtype, {source_rows_, pitch}, 1));
    // What lies between rows would spoil every sum.
    for (std::int64_t r = 0; r < source_rows_; ++r) {
      for (std::int64_t i = p.k; i < pitch; ++i) x_->set(r * pitch + i, INFINITY);
    }
    w_ = std::make_unique<Array>(test::random_array(p.dtype, {groups, p.n, p.k}, 2));
    const float scale = 1 / std::sqrt(static_cast<float>(p.k));
    for (std::int64_t i = 0; i < w_->tensor.elements(); ++i) w_->set(i, w_->get(i) * scale);
    bias_ = std::make_unique<Array>(test::random_array(DType::f32, {groups, p.n}, 3));
    const std::int64_t columns = p.paired ? p.n / 2 : p.n;
    out_ = std::make_unique<Array>(
        p.out, std::initializer_list<std::int64_t>{rows_ + 3, columns + p.out_gap});
    for (std::int64_t i = 0; i < out_->tensor.elements(); ++i) out_->set(i, 7);
    for (std::int64_t r = 0; r < rows_; ++r) {
      const bool none = p.gathered_from == 0 || (p.holes && r % 11 == 3);
      permutation_.push_back(none ? -1 : static_cast<std::int32_t>(r * 7 % (2 * p.gathered_from)));
    }
    memory_ = context.allocate(prepared_bytes(context, p.dtype, groups, p.n, p.k, p.paired));
    std::vector<Tensor> gate, up;
    for (int g = 0; g < groups; ++g) {
      gate.push_back(p.paired ? w_->tensor[g].rows(0, p.n / 2) : w_->tensor[g]);
      if (p.paired) up.push_back(w_->tensor[g].rows(p.n / 2, p.n));
    }
    const PreparedWeights prepared = p.paired ? prepare_paired(context, p.dtype, gate, up, memory_)
                                              : prepare(context, p.dtype, gate, memory_);
    mirror_ = std::make_unique<test::Mirror>(context);
    Tensor x = x_->tensor, out = out_->tensor;
    x.shape[1] = p.k;
    out.shape[1] = columns;
    whole_ = mirror_->out(out_->tensor);  // first: views of it share its copy
    product = {.layout = {p.dtype, p.n, p.k, p.paired},
               .groups = groups,
               .prepared = prepared.data,
               .offsets = mirror_->in(view(offsets.data(), {groups + 1})).as<const std::int32_t>(),
               .rows = mirror_->in(x),
               .slots = p.gathered_from > 0 ? 2 : 1,
               .bias = p.bias ? mirror_->in(bias_->tensor) : Tensor{},
               .activation = p.rule,
               .out = mirror_->out(out)};
    if (p.gathered_from > 0) {
      product.permutation =
          mirror_->in(view(permutation_.data(), {rows_})).as<const std::int32_t>();
    }
    expect();
  }

  std::vector<ProductPlan> plans() const {
    const auto all = cuda_engine::candidates(cuda_engine::sizes_of(product),
                                             cuda_engine::figures(context_.gpu()));
    return {all.begin(), all.end() - 1};  // the portable one is last
  }
  std::vector<ProductPlan> portable_plans() const {
    const auto all = cuda_engine::portable_candidates(cuda_engine::sizes_of(product),
                                                      cuda_engine::figures(context_.gpu()));
    return {all.begin(), all.end()};
  }
  // Runs it over a clean out, and compares.
  std::vector<std::uint32_t> run(const ProductPlan& plan) {
    for (std::int64_t i = 0; i < out_->tensor.elements(); ++i) out_->set(i, 7);
    context_.copy(whole_.data, out_->tensor.data, static_cast<std::size_t>(out_->tensor.bytes()));
    EXPECT_TRUE(cuda_engine::multiply_as_planned(context_.gpu(), plan, product));
    mirror_->fetch();
    return out_->data;
  }
  std::vector<std::uint32_t> fetched() {
    mirror_->fetch();
    return out_->data;
  }
  void check() const {
    const std::int64_t columns = p.paired ? p.n / 2 : p.n, pitch = columns + p.out_gap;
    for (std::int64_t r = 0; r < out_->tensor.shape[0]; ++r) {
      for (std::int64_t j = 0; j < pitch; ++j) {
        const auto got = static_cast<double>(out_->get(r * pitch + j));
        if (r >= rows_ || j >= columns) {
          ASSERT_EQ(got, 7) << "row " << r << ", column " << j << " is not out's";
          continue;
        }
        const auto at = static_cast<std::size_t>(r * columns + j);
        ASSERT_NEAR(got, want_[at], bound_[at]) << "row " << r << ", column " << j;
      }
    }
  }

  Problem p;
  std::vector<std::int32_t> offsets;
  cuda_engine::GroupedProduct product;

 private:
  void expect() {
    const std::int64_t columns = p.paired ? p.n / 2 : p.n, pitch = x_->tensor.shape[1];
    std::vector<double> sums(static_cast<std::size_t>(p.n)), bounds(sums.size());
    for (std::size_t g = 0; g < p.sizes.size(); ++g) {
      for (std::int64_t r = offsets[g]; r < offsets[g + 1]; ++r) {
        const std::int32_t pair = permutation_[static_cast<std::size_t>(r)];
        const std::int64_t from = p.gathered_from > 0 ? (pair < 0 ? -1 : pair / 2) : r;
        for (std::int64_t j = 0; j < p.n; ++j) {
          double sum = 0, magnitude = 0;
          const std::int64_t row = (static_cast<std::int64_t>(g) * p.n + j) * p.k;
          for (std::int64_t i = 0; i < p.k && from >= 0; ++i) {
            const double term = static_cast<double>(w_->get(row + i)) *
                                static_cast<double>(x_->get(from * pitch + i));
            sum += term;
            magnitude += std::abs(term);
          }
          if (p.bias)
            sum += static_cast<double>(bias_->get(static_cast<std::int64_t>(g) * p.n + j));
          sums[static_cast<std::size_t>(j)] = sum;
          bounds[static_cast<std::size_t>(j)] =
              test::sum_bound(p.k, magnitude) + 1e-7 * std::abs(sum);
        }
        for (std::int64_t j = 0; j < columns; ++j) {
          const auto a = static_cast<std::size_t>(j), b = static_cast<std::size_t>(columns + j);
          double value = sums[a], bound = bounds[a];
          if (p.paired) {
            value = test::activate(p.rule, sums[a], sums[b]);
            bound = 2 * (bounds[a] + bounds[b]) * (1 + std::abs(sums[a]) + std::abs(sums[b]));
          } else if (p.rule.kind != ActivationRule::identity) {
            value = test::activate(p.rule, 0, sums[a]);
            bound *= 2 * (1 + std::abs(sums[a]));
          }
          want_.push_back(value);
          bound_.push_back(bound + test::rounding(p.out) * std::abs(value) * 1.01 + 1e-6);
        }
      }
    }
  }

  Context context_;
  std::int64_t rows_ = 0, source_rows_ = 0;
  std::unique_ptr<Array> x_, w_, bias_, out_;
  std::vector<std::int32_t> permutation_;
  Buffer memory_;
  std::unique_ptr<test::Mirror> mirror_;
  Tensor whole_;
  std::vector<double> want_, bound_;
};

// Every plan; those that do not split k give the same bits, and each the same bits again.
void run_all(const Problem& problem) {
  const Context context = cuda();
  Made made(context, problem);
  const auto own = made.plans(), portable = made.portable_plans();
  ASSERT_GE(own.size(), 4U);
  ASSERT_EQ(portable.size(), 3U);
  for (const auto& plans : {own, portable}) {
    std::vector<std::uint32_t> first;
    for (const ProductPlan& plan : plans) {
      SCOPED_TRACE(describe(plan) + " of [" + std::to_string(problem.n) + ", " +
                   std::to_string(problem.k) + "]");
      const std::vector<std::uint32_t> bits = made.run(plan);
      made.check();
      if (::testing::Test::HasFatalFailure()) return;
      EXPECT_EQ(made.run(plan), bits) << "again";
      if (plan.split > 1) continue;
      if (first.empty()) first = bits;
      EXPECT_EQ(bits, first) << "other bits than the first plan's";
    }
  }
}

TEST(HopperGemm, RaggedGroupsAndTails) {
  SHUNT_ON_HOPPER_ONLY();
  const std::vector<std::int32_t> ragged = {0, 1, 130, 0, 64, 65, 7, 0, 0, 300, 16, 9};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{128, 64},
                               {256, 256},
                               {72, 104},
                               {264, 72},
                               {8, 8},
                               {130, 264},
                               {1, 8},
                               {520, 304}}) {
      run_all({.dtype = dtype, .n = n, .k = k, .sizes = ragged, .out = dtype});
    }
  }
}

// Each multiple of 16 rows has a tensor map of its own.
TEST(HopperGemm, TilesOfEveryHeight) {
  SHUNT_ON_HOPPER_ONLY();
  std::vector<std::int32_t> sizes;
  for (int rows = 16; rows <= 256; rows += 16) sizes.push_back(rows - rows / 16 % 3);
  for (const int from : {0, 300}) {
    run_all({.n = 264, .k = 776, .sizes = sizes, .gathered_from = from, .holes = from > 0});
  }
}

TEST(HopperGemm, WidthsOfModels) {
  SHUNT_ON_HOPPER_ONLY();
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{2880, 1408}, {768, 2880}}) {
    run_all({.n = n, .k = k, .sizes = {0, 3, 17, 0, 90}});
  }
}

TEST(HopperGemm, ManyGroupsAndOne) {
  SHUNT_ON_HOPPER_ONLY();
  std::vector<std::int32_t> sizes;
  for (int g = 0; g < 1000; ++g) sizes.push_back(g % 3 == 0 ? 0 : g == 500 ? 270 : g % 7 == 0);
  run_all({.n = 40, .k = 72, .sizes = sizes});
  run_all({.n = 1544, .k = 136, .sizes = {1500}});  // bands of row tiles
}

TEST(HopperGemm, EveryEpilogue) {
  SHUNT_ON_HOPPER_ONLY();
  const std::vector<std::int32_t> sizes = {5, 0, 200, 33};
  const ActivationRule swiglu{.kind = ActivationRule::silu};
  const ActivationRule oss{
      .kind = ActivationRule::silu, .alpha = 1.702f, .limit = 0.7f, .up_offset = 1};
  const ActivationRule step{.kind = ActivationRule::silu, .limit_output = true, .limit = 0.5f};
  const ActivationRule gelu{.kind = ActivationRule::gelu};
  const ActivationRule relu2{.kind = ActivationRule::relu2, .gated = false};
  for (const DType out : {DType::bf16, DType::f16, DType::f32}) {
    for (const std::int64_t gap : {0, 3, 8}) {
      run_all({.n = 136, .k = 200, .sizes = sizes, .out = out, .bias = true, .out_gap = gap});
    }
    for (const auto& rule : {swiglu, oss, step, gelu, test::situ(), test::situ(0.3f, 1)}) {
      run_all({.dtype = DType::f16,
               .n = 2 * 100,
               .k = 136,
               .sizes = sizes,
               .out = out,
               .bias = true,
               .paired = true,
               .rule = rule});
    }
    for (const bool bias : {false, true}) {  // results that may leave from registers
      run_all({.n = 2 * 144,
               .k = 96,
               .sizes = sizes,
               .out = out,
               .bias = bias,
               .paired = true,
               .rule = bias ? oss : swiglu});
    }
    run_all({.n = 70, .k = 96, .sizes = sizes, .out = out, .bias = true, .rule = relu2});
  }
}

TEST(HopperGemm, GatheredRows) {
  SHUNT_ON_HOPPER_ONLY();
  for (const std::int64_t k : {8, 104, 328}) {
    run_all({.n = 200,
             .k = k,
             .sizes = {3, 0, 70, 1, 12},
             .paired = true,
             .rule = {.kind = ActivationRule::silu},
             .gathered_from = 20});
  }
  // More rows than a tile has, and all from one row.
  run_all({.n = 264,
           .k = 200,
           .sizes = {300, 0, 33, 600, 64},
           .bias = true,
           .gathered_from = 150,
           .holes = true});
  run_all({.n = 136, .k = 72, .sizes = {0, 270}, .gathered_from = 1});
}

TEST(HopperGemm, AGraphFollowsOffsetsUnderEveryPlan) {
  SHUNT_ON_HOPPER_ONLY();
  for (const auto& [dependent, from] : {std::pair{false, 0}, {true, 0}, {false, 90}, {true, 90}}) {
    const test::Stream stream;
    const Context context = cuda({.stream = stream.get(), .dependent_launch = dependent});
    const Problem one{.n = 264, .k = 328, .sizes = {150, 0, 10, 40}, .gathered_from = from};
    const Problem other{.n = 264, .k = 328, .sizes = {1, 60, 139, 0}, .gathered_from = from};
    Made made(context, one), want(context, other);
    std::vector<ProductPlan> plans = made.plans();
    const auto portable = made.portable_plans();
    plans.insert(plans.end(), portable.begin(), portable.end());
    for (const ProductPlan& plan : plans) {
      SCOPED_TRACE(describe(plan));
      const test::Graph graph(stream, [&] {
        for (int twice = 0; twice < 2; ++twice) {
          cuda_engine::multiply_as_planned(context.gpu(), plan, made.product);
        }
      });
      auto* const offsets = const_cast<std::int32_t*>(made.product.offsets);
      const std::vector<std::uint32_t> bits = want.run(plan);
      want.check();
      made.run(plan);
      context.copy(offsets, want.offsets.data(), want.offsets.size() * sizeof(std::int32_t));
      graph.replay();
      EXPECT_EQ(made.fetched(), bits);
      context.copy(offsets, made.offsets.data(), made.offsets.size() * sizeof(std::int32_t));
    }
  }
}

}  // namespace
}  // namespace shunt
#endif
