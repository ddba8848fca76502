// Results beyond f16 by every kernel and tile that a GPU has for 16-bit and fp8 rows: finite sums
// become +-65504, wherever they leave from, and those that fit are what they are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "format/plain.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/on_hopper.hpp"
#include "gemm/packed_data.hpp"
#include "gemm/rule_reference.hpp"
#include "shunt/gemm.hpp"
#if SHUNT_CUDA_BUILT
#include "gemm/fragment_prepare.hpp"
#include "gemm/packed_product.hpp"

namespace shunt {
namespace {

using cpu_engine::ActivationRule;
using cuda_engine::PackedPlan;
using cuda_engine::ProductPlan;
using test::Array;

constexpr double largest = 65504;
const ActivationRule none{.kind = ActivationRule::identity, .gated = false};
const ActivationRule swiglu{.kind = ActivationRule::silu};
const ActivationRule relu2{.kind = ActivationRule::relu2, .gated = false};

struct Problem {
  FormatSpec format{};
  RowFormat rows = RowFormat::as_dtype;  // fp8: given in fp8, with scales
  DType dtype = DType::f16;
  std::int64_t k = 272;
  std::vector<std::int32_t> sizes = {3, 0, 130, 40};
  ActivationRule rule = none;
  bool bias = false;
  std::int64_t out_gap = 0;  // elements between rows of out

  bool paired() const { return rule.kind == ActivationRule::silu; }
  static constexpr std::int64_t columns = 136;
  std::int64_t n() const { return paired() ? 2 * columns : columns; }
  std::string text() const {
    return to_string(format) + ", rows " + to_string(rows) + " of " + to_string(dtype) + " by [" +
           std::to_string(n()) + ", " + std::to_string(k) + "]" + (bias ? ", bias" : "") +
           (paired()                             ? ", SwiGLU"
            : rule.kind == ActivationRule::relu2 ? ", ReLU2"
                                                 : "") +
           ", gap " + std::to_string(out_gap);
  }
};

// Rows of about 40 by weights with which results are of about what fits: beyond it often.
class Made {
 public:
  Made(const Context& context, const Problem& problem) : p(problem), context_(context) {
    const auto groups = static_cast<int>(p.sizes.size());
    for (const auto size : p.sizes) offsets_.push_back(offsets_.back() + size);
    rows_ = offsets_.back();
    make_rows();
    make_matrices(groups);
    const float spread = p.rule.kind == ActivationRule::identity ? 20000 : 100;
    bias_ = std::make_unique<Array>(test::random_array(DType::f32, {groups, p.n()}, 3));
    for (std::int64_t i = 0; i < groups * p.n(); ++i) bias_->set(i, spread * bias_->get(i));
    out_ = std::make_unique<Array>(
        DType::f16, std::initializer_list<std::int64_t>{rows_, p.columns + p.out_gap});
    mirror_ = std::make_unique<test::Mirror>(context);
    Tensor out = out_->tensor;
    out.shape[1] = p.columns;
    there_ = mirror_->out(out);
    expect();
  }

  // What every product has.
  template <class Product>
  void put_into(Product& product) {
    product.groups = static_cast<int>(p.sizes.size());
    product.prepared = prepared_.data;
    product.offsets =
        mirror_->in(view(offsets_.data(), {product.groups + 1})).template as<const std::int32_t>();
    product.rows = mirror_->in(x_->tensor);
    product.activation = p.rule;
    if (p.bias) product.bias = mirror_->in(bias_->tensor);
    product.out = there_;
  }
  Tensor row_scales() {
    return mirror_->in(p.rows == RowFormat::fp8_block
                           ? view(scales_.data(), {rows_, (p.k + 127) / 128})
                           : view(scales_.data(), {rows_}));
  }
  const PreparedWeights& prepared() const { return prepared_; }

  // `many`: by a kernel for many rows, which rounds weights of int4.
  template <class Plan, class Product>
  void run_and_check(const Plan& plan, const Product& product, bool many) {
    mirror_->poison();
    ASSERT_TRUE(cuda_engine::multiply_as_planned(context_.gpu(), plan, product));
    mirror_->fetch();
    const std::int64_t pitch = p.columns + p.out_gap;
    int above = 0, below = 0, within = 0;
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t c = 0; c < p.columns; ++c) {
        const auto at = static_cast<std::size_t>(r * p.columns + c);
        const auto got = static_cast<double>(out_->get(r * pitch + c));
        const double want = want_[at], bound = bound_[at] + (many ? loss_[at] : 0);
        const double fits = std::clamp(want, -largest, largest);
        ASSERT_NEAR(got, fits, bound + test::rounding(DType::f16) * std::abs(fits) * 1.01 + 1e-6)
            << "row " << r << " column " << c << ", of a sum of " << want;
        if (std::abs(want) - bound < 65520) {  // what is rounded to the largest
          ++within;
          continue;
        }
        ASSERT_EQ(got, want > 0 ? largest : -largest) << "row " << r << " column " << c;
        ++(want > 0 ? above : below);
      }
    }
    EXPECT_GT(above, 20);
    EXPECT_TRUE(below > 20 || p.rule.kind == ActivationRule::relu2);
    EXPECT_GT(within, 20);
  }

  Problem p;

 private:
  void make_rows() {
    const Array normal = test::random_array(DType::f32, {rows_, p.k}, 1);
    const bool fp8 = p.rows != RowFormat::as_dtype;
    x_ = std::make_unique<Array>(fp8 ? DType::f8_e4m3 : p.dtype,
                                 std::initializer_list<std::int64_t>{rows_, p.k});
    for (std::int64_t i = 0; i < rows_ * p.k; ++i) x_->set(i, 40 * normal.get(i));
    if (!fp8) return;
    const std::int64_t blocks = p.rows == RowFormat::fp8_block ? (p.k + 127) / 128 : 1;
    for (std::int64_t i = 0; i < rows_ * blocks; ++i) {
      scales_.push_back(0.75F + 0.125F * static_cast<float>(i % 5));
    }
  }
  // As they are multiplied.
  double x(std::int64_t r, std::int64_t i) const {
    const auto number = static_cast<double>(x_->get(r * p.k + i));
    if (scales_.empty()) return number;
    const std::int64_t at = p.rows == RowFormat::fp8_block ? r * ((p.k + 127) / 128) + i / 128 : r;
    return number * static_cast<double>(scales_[static_cast<std::size_t>(at)]);
  }
  void make_matrices(int groups) {
    const std::int64_t each = p.columns, count = each * p.k;
    std::vector<PackedMatrix> gate, up;
    std::vector<Tensor> plain_gate, plain_up;
    for (int i = 0; i < groups * (p.paired() ? 2 : 1); ++i) {
      const bool second = p.paired() && i % 2 == 1;
      const float usual = p.rule.kind == ActivationRule::identity ? 80 : 0.46F;  // squares
      const std::vector<float> values = normal_values(count, static_cast<unsigned>(10 + i), usual);
      std::vector<double>& numbers = weights_.emplace_back();
      if (p.format == FormatSpec{}) {
        plain_.emplace_back(p.dtype, std::initializer_list<std::int64_t>{each, p.k});
        for (std::int64_t j = 0; j < count; ++j) {
          plain_.back().set(j, values[static_cast<std::size_t>(j)]);
          numbers.push_back(static_cast<double>(plain_.back().get(j)));
        }
        (second ? plain_up : plain_gate).push_back(plain_.back().tensor);
        continue;
      }
      packed_.push_back(Packed::of(p.format, values, each, p.k));
      const PackedMatrix& m = packed_.back().packed;
      for (std::int64_t j = 0; j < count; ++j) {
        numbers.push_back(plain_weight(m, j / p.k, j % p.k));
      }
      (second ? up : gate).push_back(m);
    }
    memory_ = context_.allocate(
        prepared_bytes(context_, p.dtype, p.format, groups, p.n(), p.k, p.paired(), p.rows));
    if (p.format == FormatSpec{}) {
      prepared_ = p.paired() ? prepare_paired(context_, p.dtype, plain_gate, plain_up, memory_)
                             : prepare(context_, p.dtype, plain_gate, memory_);
    } else {
      prepared_ = p.paired() ? prepare_packed_paired(context_, p.dtype, gate, up, memory_, p.rows)
                             : prepare_packed(context_, p.dtype, gate, memory_, p.rows);
    }
  }

  struct Sum {
    double value = 0, off = 0, loss = 0;
  };
  Sum sum_of(std::int64_t r, int group, std::int64_t row) const {
    const bool second = p.paired() && row >= p.n() / 2;
    const std::vector<double>& w =
        weights_[static_cast<std::size_t>(p.paired() ? 2 * group + (second ? 1 : 0) : group)];
    const std::int64_t line = second ? row - p.n() / 2 : row;
    Sum s;
    double magnitude = 0;
    for (std::int64_t begin = 0; begin < p.k; begin += 128) {
      double part = 0, most = 0;
      for (std::int64_t i = begin; i < std::min(p.k, begin + 128); ++i) {
        const double term = w[static_cast<std::size_t>(line * p.k + i)] * x(r, i);
        part += term;
        magnitude += std::abs(term);
        most = std::max({most, std::abs(term), std::abs(part)});
      }
      s.value += part;
      if (p.rows != RowFormat::as_dtype) s.off += test::fp8_step_bound(most);
    }
    s.off += test::sum_bound(p.k, magnitude) + 1e-6 * magnitude;
    const bool bf16 = p.dtype == DType::bf16;
    s.loss = magnitude * (p.format.format == Format::int4     ? (bf16 ? 0x1.01p-7 : 0x1p-10)
                          : p.format.format == Format::dense3 ? (bf16 ? 0x1p-8 : 0)
                                                              : 0);
    if (p.bias) s.value += static_cast<double>(bias_->get(group * p.n() + row));
    return s;
  }
  void expect() {
    for (std::size_t g = 0; g < p.sizes.size(); ++g) {
      for (std::int64_t r = offsets_[g]; r < offsets_[g + 1]; ++r) {
        for (std::int64_t c = 0; c < p.columns; ++c) {
          const auto group = static_cast<int>(g);
          const Sum a = sum_of(r, group, c);
          if (p.paired()) {
            const Sum b = sum_of(r, group, p.columns + c);
            const double grown = 2 * (1 + std::abs(a.value) + std::abs(b.value));
            want_.push_back(test::activate(p.rule, a.value, b.value));
            bound_.push_back((a.off + b.off) * grown);
            loss_.push_back((a.loss + b.loss) * grown);
          } else if (p.rule.kind == ActivationRule::identity) {
            want_.push_back(a.value), bound_.push_back(a.off), loss_.push_back(a.loss);
          } else {
            const double grown = 2 * (1 + std::abs(a.value));
            want_.push_back(test::activate(p.rule, 0, a.value));
            bound_.push_back(a.off * grown), loss_.push_back(a.loss * grown);
          }
        }
      }
    }
  }

  Context context_;
  std::int64_t rows_ = 0;
  std::vector<std::int32_t> offsets_ = {0};
  std::unique_ptr<Array> x_, bias_, out_;
  std::vector<float> scales_;
  std::vector<Packed> packed_;
  std::vector<Array> plain_;
  std::vector<std::vector<double>> weights_;
  Buffer memory_;
  PreparedWeights prepared_;
  std::unique_ptr<test::Mirror> mirror_;
  Tensor there_;
  std::vector<double> want_, bound_, loss_;
};

// Each epilogue that a kernel has: results that leave as they lie, one by one, and with a bias or
// an activation before.
std::vector<Problem> every_end(Problem problem) {
  std::vector<Problem> all = {problem};
  problem.out_gap = 3;
  all.push_back(problem);
  problem.out_gap = 8, problem.bias = true;
  all.push_back(problem);
  problem.rule = swiglu;
  all.push_back(problem);
  problem.bias = false, problem.out_gap = 0;
  all.push_back(problem);
  return all;
}

// Plain weights: Hopper's kernels, and mma.sync's.
TEST(HopperGemm, F16Saturates) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  for (const DType dtype : {DType::f16, DType::bf16}) {
    std::vector<Problem> problems = every_end({.dtype = dtype});
    problems.push_back({.dtype = dtype, .rule = relu2, .bias = true});
    for (const Problem& problem : problems) {
      SCOPED_TRACE(problem.text());
      Made made(context, problem);
      cuda_engine::GroupedProduct product;
      product.layout = {dtype, problem.n(), problem.k, problem.paired()};
      made.put_into(product);
      const auto sizes = cuda_engine::sizes_of(product);
      const auto figures = cuda_engine::figures(context.gpu());
      int few = 0, many = 0, others = 0;
      const auto run = [&](const ProductPlan& plan) {
        if (plan.kernel == ProductPlan::portable && plan.blocks == 0) return;  // the next test
        SCOPED_TRACE(describe(plan));
        made.run_and_check(plan, product, plan.kernel == ProductPlan::many_rows);
        ++(plan.kernel == ProductPlan::few_rows    ? few
           : plan.kernel == ProductPlan::many_rows ? many
                                                   : others);
      };
      for (const ProductPlan& plan : cuda_engine::candidates(sizes, figures)) {
        run(plan);
        if (HasFatalFailure()) return;
      }
      for (const ProductPlan& plan : cuda_engine::portable_candidates(sizes, figures)) {
        run(plan);
        if (HasFatalFailure()) return;
      }
      EXPECT_GT(others, 0);
      if (test::on_hopper()) {
        EXPECT_GT(few, 0);
        EXPECT_GT(many, 0);
      }
    }
  }
}

// Packed weights with rows of 16 bits: few rows, many, and mma.sync.
TEST(PackedGemm, F16Saturates) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  std::vector<FormatSpec> formats = known_formats();
  formats.push_back({Format::int4, 128});
  for (const FormatSpec& format : formats) {
    std::vector<Problem> problems = every_end({.format = format});
    problems.push_back({.format = format, .dtype = DType::bf16});
    problems.push_back({.format = format, .rule = relu2});
    for (Problem& problem : problems) {
      problem.sizes = {3, 0, 70};
      SCOPED_TRACE(problem.text());
      Made made(context, problem);
      cuda_engine::FragmentProduct product;
      product.layout = cuda_engine::fragments_of(made.prepared());
      made.put_into(product);
      int few = 0, many = 0, portable = 0;
      for (const PackedPlan& plan : test::every_fragment_plan(
               cuda_engine::sizes_of(product), cuda_engine::figures(context.gpu()))) {
        SCOPED_TRACE(cuda_engine::fragment_words(plan));
        made.run_and_check(plan, product, plan.kernel == PackedPlan::many_rows);
        if (HasFatalFailure()) return;
        ++(plan.kernel == PackedPlan::few_rows    ? few
           : plan.kernel == PackedPlan::many_rows ? many
                                                  : portable);
      }
      EXPECT_GT(portable, 0);
      if (test::on_hopper()) {
        EXPECT_GT(few, 0);
        EXPECT_GT(many, 0);
      }
    }
  }
}

TEST(Fp8Gemm, F16Saturates) {
  SHUNT_ON_HOPPER_ONLY();
  const Context context = cuda();
  for (const auto& [format, rows] : {std::pair{Format::fp8_block, RowFormat::fp8_block},
                                     {Format::fp8_channel, RowFormat::fp8_token},
                                     {Format::fp8_tensor, RowFormat::fp8_token}}) {
    for (const Problem& problem :
         every_end({.format = {.format = format}, .rows = rows, .dtype = DType::bf16})) {
      SCOPED_TRACE(problem.text());
      Made made(context, problem);
      cuda_engine::PackedProduct product;
      product.layout = {format, problem.n(), problem.k, problem.paired()};
      made.put_into(product);
      product.row_scales = made.row_scales();
      int few = 0, many = 0;
      for (const PackedPlan& plan : cuda_engine::candidates(cuda_engine::sizes_of(product),
                                                            cuda_engine::figures(context.gpu()))) {
        SCOPED_TRACE(describe(plan));
        made.run_and_check(plan, product, false);
        if (HasFatalFailure()) return;
        ++(plan.kernel == PackedPlan::many_rows ? many : few);
      }
      EXPECT_GT(few, 0);
      EXPECT_GT(many, 0);
    }
  }
}

// Infinities stay what they are, as on the CPU, and so do NaN.
TEST(HopperGemm, F16KeepsInfinitiesAndNan) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  const std::int64_t n = 128, k = 64, rows = 70;
  const std::vector<std::int32_t> offsets = {0, rows};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Array x(dtype, {rows, k}), w(dtype, {1, n, k}), out(DType::f16, {rows, n});
    for (std::int64_t i = 0; i < rows * k; ++i) x.set(i, 1);
    for (std::int64_t i = 0; i < n * k; ++i) w.set(i, i / k % 2 == 0 ? 2.0F : -2.0F);
    x.set(3 * k + 5, INFINITY);
    x.set(64 * k + 9, NAN);
    const Buffer memory = context.allocate(prepared_bytes(context, dtype, 1, n, k));
    const PreparedWeights prepared = prepare(context, dtype, {w.tensor[0]}, memory);
    test::Mirror mirror(context);
    cuda_engine::GroupedProduct product;
    product.layout = {dtype, n, k, false};
    product.groups = 1;
    product.prepared = prepared.data;
    product.offsets = mirror.in(view(offsets.data(), {2})).as<const std::int32_t>();
    product.rows = mirror.in(x.tensor);
    product.out = mirror.out(out.tensor);
    const auto run = [&](const ProductPlan& plan) {
      if (plan.kernel == ProductPlan::portable && plan.blocks == 0) return;
      SCOPED_TRACE(describe(plan));
      mirror.poison();
      ASSERT_TRUE(cuda_engine::multiply_as_planned(context.gpu(), plan, product));
      mirror.fetch();
      for (std::int64_t i = 0; i < rows * n; ++i) {
        const float want = (i % n % 2 == 0 ? 1.0F : -1.0F) * (i / n == 3 ? INFINITY : 2 * k);
        if (i / n == 64) {
          ASSERT_TRUE(std::isnan(out.get(i))) << "column " << i % n;
        } else {
          ASSERT_EQ(out.get(i), want) << "row " << i / n << " column " << i % n;
        }
      }
    };
    const auto sizes = cuda_engine::sizes_of(product);
    const auto figures = cuda_engine::figures(context.gpu());
    for (const ProductPlan& plan : cuda_engine::candidates(sizes, figures)) run(plan);
    for (const ProductPlan& plan : cuda_engine::portable_candidates(sizes, figures)) run(plan);
  }
}

}  // namespace
}  // namespace shunt
#endif
