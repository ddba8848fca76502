// Every kernel and tile for packed weights with rows of 16 bits, Hopper's and other GPUs', all
// formats, against sums in double precision of what the formats' own words say: ragged and empty
// groups, tails of every side, gathered, converted and weighted rows, each epilogue.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "format/plain.hpp"
#include "gemm/fragment_product.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/on_hopper.hpp"
#include "gemm/packed_prepare.hpp"
#include "gemm/rule_reference.hpp"
#include "shunt/gemm.hpp"
#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"

namespace shunt {
namespace {

using cpu_engine::ActivationRule;
using cuda_engine::PackedPlan;
using test::Array;

struct Problem {
  FormatSpec format{};
  DType dtype = DType::bf16;
  std::int64_t n = 0, k = 0;
  std::vector<std::int32_t> sizes;  // rows of each group
  DType rows = DType::bf16;
  DType out = DType::bf16;
  bool bias = false;
  bool paired = false;
  ActivationRule rule = {.kind = ActivationRule::identity, .gated = false};
  int gathered_from = 0;  // rows of the source; 0: not gathered
  bool weighted = false;
  bool odd_rows = false;     // not aligned
  std::int64_t out_gap = 0;  // elements between rows of out
};

class Made {
 public:
  Made(const Context& context, const Problem& problem) : p(problem), context_(context) {
    const auto groups = static_cast<int>(p.sizes.size());
    offsets.push_back(0);
    for (const auto size : p.sizes) offsets.push_back(offsets.back() + size);
    rows_ = offsets.back();
    pitch_ = p.odd_rows ? p.k + 1 : (p.k + 7) / 8 * 8 + 8;
    source_rows_ = p.gathered_from > 0 ? p.gathered_from : rows_ + 3;
    x_ = std::make_unique<Array>(test::random_array(p.rows, {source_rows_, pitch_}, 1));
    // What lies between rows would spoil every sum.
    for (std::int64_t r = 0; r < source_rows_; ++r) {
      for (std::int64_t i = p.k; i < pitch_; ++i) x_->set(r * pitch_ + i, INFINITY);
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      permutation_.push_back(
          p.gathered_from > 0 ? static_cast<std::int32_t>(r * 7 % (2 * p.gathered_from)) : 0);
      weights_.push_back(0.25F + static_cast<float>(r % 7));
    }
    const std::int64_t each = p.paired ? p.n / 2 : p.n;
    const float usual = 1 / std::sqrt(static_cast<float>(p.k));
    std::vector<PackedMatrix> gate, up;
    for (int g = 0; g < groups; ++g) {
      const auto seed =
          static_cast<unsigned>(2 * (g % 3) + 10);  // few different ones: packing is slow
      matrices_.push_back(Packed::of(p.format, normal_values(each * p.k, seed, usual), each, p.k));
      if (!p.paired) continue;
      matrices_.push_back(
          Packed::of(p.format, normal_values(each * p.k, seed + 1, 2 * usual), each, p.k));
    }
    for (std::size_t i = 0; i < matrices_.size(); ++i) {
      (p.paired && i % 2 == 1 ? up : gate).push_back(matrices_[i].packed);
    }
    memory_ =
        context.allocate(prepared_bytes(context, p.dtype, p.format, groups, p.n, p.k, p.paired));
    const PreparedWeights prepared =
        p.paired ? prepare_packed_paired(context, p.dtype, gate, up, memory_)
                 : prepare_packed(context, p.dtype, gate, memory_);
    bias_ = std::make_unique<Array>(test::random_array(DType::f32, {groups, p.n}, 3));
    columns_ = each;
    out_ = std::make_unique<Array>(
        p.out, std::initializer_list<std::int64_t>{rows_ + 3, columns_ + p.out_gap});
    clear();
    mirror_ = std::make_unique<test::Mirror>(context);
    Tensor from = x_->tensor, out = out_->tensor;
    from.shape[1] = p.k;
    out.shape[1] = columns_;
    whole_ = mirror_->out(out_->tensor);  // first: views of it share its copy
    product = {.layout = {resolved(p.format), p.dtype, p.n, p.k, p.paired},
               .groups = groups,
               .prepared = prepared.data,
               .offsets = mirror_->in(view(offsets.data(), {groups + 1})).as<const std::int32_t>(),
               .rows = mirror_->in(from),
               .slots = p.gathered_from > 0 ? 2 : 1,
               .bias = p.bias ? mirror_->in(bias_->tensor) : Tensor{},
               .activation = p.rule,
               .out = mirror_->out(out)};
    if (p.gathered_from > 0) {
      product.permutation =
          mirror_->in(view(permutation_.data(), {rows_})).as<const std::int32_t>();
    }
    if (p.weighted) product.row_scale = mirror_->in(view(weights_.data(), {rows_})).as<float>();
    expect();
  }

  std::vector<PackedPlan> plans() const {
    return test::every_fragment_plan(cuda_engine::sizes_of(product),
                                     cuda_engine::figures(context_.gpu()));
  }
  // Runs it over a clean out.
  std::vector<std::uint32_t> run(const PackedPlan& plan) {
    clear();
    context_.copy(whole_.data, out_->tensor.data, static_cast<std::size_t>(out_->tensor.bytes()));
    EXPECT_TRUE(cuda_engine::multiply_as_planned(context_.gpu(), plan, product));
    return fetched();
  }
  std::vector<std::uint32_t> fetched() {
    mirror_->fetch();
    return out_->data;
  }
  // Few rows weigh sums, many what they multiply.
  void check(bool many) const {
    const std::int64_t pitch = columns_ + p.out_gap;
    for (std::int64_t r = 0; r < out_->tensor.shape[0]; ++r) {
      for (std::int64_t j = 0; j < pitch; ++j) {
        const auto got = static_cast<double>(out_->get(r * pitch + j));
        if (r >= rows_ || j >= columns_) {
          ASSERT_EQ(got, 7) << "row " << r << ", column " << j << " is not out's";
          continue;
        }
        const auto at = static_cast<std::size_t>(r * columns_ + j);
        const std::size_t kernel = many ? 1 : 0;
        ASSERT_NEAR(got, want_[kernel][at], bound_[kernel][at]) << "row " << r << ", column " << j;
      }
    }
  }

  Problem p;
  std::vector<std::int32_t> offsets;
  cuda_engine::FragmentProduct product;

 private:
  void clear() {
    for (std::int64_t i = 0; i < out_->tensor.elements(); ++i) out_->set(i, 7);
  }
  float rounded_to_dtype(float x) const {
    return p.dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(x)) : f16_to_f32(f32_to_f16(x));
  }
  void expect() {
    std::vector<std::vector<double>> dense;  // decoded once
    for (const Packed& m : matrices_) {
      std::vector<double> values;
      for (std::int64_t n = 0; n < m.packed.n; ++n) {
        for (std::int64_t k = 0; k < p.k; ++k) values.push_back(plain_weight(m.packed, n, k));
      }
      dense.push_back(std::move(values));
    }
    // Where a weight is rounded, by kernels for many rows: dense3's eleven bits are f16's.
    const bool bf16 = p.dtype == DType::bf16;
    const double loss = p.format.format == Format::int4     ? (bf16 ? 0x1.01p-7 : 0x1p-10)
                        : p.format.format == Format::dense3 ? (bf16 ? 0x1p-8 : 0)
                                                            : 0;
    for (std::size_t kernel = 0; kernel < 2; ++kernel) expect(dense, kernel, kernel * loss);
  }
  // `kernel`: 0 for few rows, which weigh sums, 1 for many.
  void expect(const std::vector<std::vector<double>>& dense, std::size_t kernel, double loss) {
    const auto n = static_cast<std::size_t>(p.n);
    std::vector<double> sums(n), off(n), x(static_cast<std::size_t>(p.k));
    for (std::size_t g = 0; g < p.sizes.size(); ++g) {
      for (std::int64_t r = offsets[g]; r < offsets[g + 1]; ++r) {
        const std::int64_t from =
            p.gathered_from > 0 ? permutation_[static_cast<std::size_t>(r)] / 2 : r;
        const float weight = p.weighted ? weights_[static_cast<std::size_t>(r)] : 1;
        for (std::int64_t i = 0; i < p.k; ++i) {
          const float value = x_->get(from * pitch_ + i);
          x[static_cast<std::size_t>(i)] =
              static_cast<double>(rounded_to_dtype(kernel == 1 ? value * weight : value));
        }
        for (std::int64_t j = 0; j < p.n; ++j) {
          const auto at = static_cast<std::size_t>(j);
          const auto& m = dense[p.paired ? 2 * g + (j >= p.n / 2 ? 1 : 0) : g];
          const double* const row = m.data() + (p.paired ? j % (p.n / 2) : j) * p.k;
          double sum = 0, magnitude = 0;
          for (std::int64_t i = 0; i < p.k; ++i) {
            const double term = row[i] * x[static_cast<std::size_t>(i)];
            sum += term;
            magnitude += std::abs(term);
          }
          if (kernel == 0)
            sum *= static_cast<double>(weight), magnitude *= static_cast<double>(weight);
          if (p.bias) {
            sum += static_cast<double>(bias_->get(static_cast<std::int64_t>(g) * p.n + j));
          }
          sums[at] = sum;
          off[at] = test::sum_bound(p.k, magnitude) + 3e-7 * std::abs(sum) + loss * magnitude;
        }
        for (std::int64_t j = 0; j < columns_; ++j) {
          const auto a = static_cast<std::size_t>(j), b = static_cast<std::size_t>(columns_ + j);
          double value = sums[a];
          if (p.paired) {
            value = test::activate(p.rule, sums[a], sums[b]);
          } else if (p.rule.kind != ActivationRule::identity) {
            value = test::activate(p.rule, 0, sums[a]);
          }
          want_[kernel].push_back(value);
          double bound = off[a];
          if (p.paired) {
            bound = 2 * (off[a] + off[b]) * (1 + std::abs(sums[a]) + std::abs(sums[b]));
          } else if (p.rule.kind != ActivationRule::identity) {
            bound *= 2 * (1 + std::abs(sums[a]));
          }
          bound_[kernel].push_back(bound + test::rounding(p.out) * std::abs(value) * 1.01 + 1e-6);
        }
      }
    }
  }

  Context context_;
  std::int64_t rows_ = 0, source_rows_ = 0, columns_ = 0, pitch_ = 0;
  std::unique_ptr<Array> x_, bias_, out_;
  std::vector<Packed> matrices_;
  std::vector<std::int32_t> permutation_;
  std::vector<float> weights_;
  Buffer memory_;
  std::unique_ptr<test::Mirror> mirror_;
  Tensor whole_;
  std::array<std::vector<double>, 2> want_, bound_;  // of few rows, and of many
};

// Every plan; those that do not split k give the same bits, of one kernel or, unless scales join
// the sums where a kernel likes, of all, and each the same again.
void run_all(const Problem& problem) {
  const Context context = cuda();
  Made made(context, problem);
  const auto plans = made.plans();
  ASSERT_GE(plans.size(), test::on_hopper() ? 8U : 2U);
  const bool same_sums = cuda_engine::sizes_of(made.product).same_sums;
  std::map<PackedPlan::Kernel, std::vector<std::uint32_t>> first;
  std::vector<std::uint32_t> weighed;  // rows, by every kernel
  for (const PackedPlan& plan : plans) {
    SCOPED_TRACE(to_string(problem.format) + ", " + cuda_engine::fragment_words(plan) + " of [" +
                 std::to_string(problem.n) + ", " + std::to_string(problem.k) + "]");
    const bool many = plan.kernel == PackedPlan::many_rows;
    const std::vector<std::uint32_t> bits = made.run(plan);
    made.check(many);
    if (::testing::Test::HasFatalFailure()) return;
    EXPECT_EQ(made.run(plan), bits) << "again";
    if (plan.split > 1) continue;
    const bool of_hopper = plan.kernel != PackedPlan::portable;
    const bool alike = same_sums && of_hopper && !problem.weighted;
    std::vector<std::uint32_t>& same = first[alike ? PackedPlan::few_rows : plan.kernel];
    if (same.empty()) same = bits;
    EXPECT_EQ(bits, same) << "other bits than the first plan's";
    if (!problem.weighted) continue;
    made.product.whole_k = true;  // rows are weighed then, by every kernel
    const std::vector<std::uint32_t> of_rows = made.run(plan);
    made.check(true);
    made.product.whole_k = false;
    if (!same_sums || !of_hopper) continue;
    if (weighed.empty()) weighed = of_rows;
    EXPECT_EQ(of_rows, weighed) << "weighed rows, other bits than the first plan's";
  }
}

const ActivationRule swiglu{.kind = ActivationRule::silu};

TEST(PackedGemm, EveryFormatRaggedGroupsAndTails) {
  SHUNT_ON_GPU_ONLY();
  const std::vector<std::int32_t> ragged = {0, 1, 130, 0, 33, 7, 0, 0, 200, 9};
  for (const FormatSpec& format : every_format()) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{128, 128},
                                 {72, 104},
                                 {130, 264},
                                 {1, 8},
                                 {200, 640}}) {
        run_all({.format = format,
                 .dtype = dtype,
                 .n = n,
                 .k = k,
                 .sizes = ragged,
                 .rows = dtype,
                 .out = dtype});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Each multiple of 16 rows has a tensor map of its own.
TEST(PackedGemm, TilesOfEveryHeight) {
  SHUNT_ON_GPU_ONLY();
  std::vector<std::int32_t> sizes;
  for (int rows = 16; rows <= 256; rows += 16) sizes.push_back(rows - rows / 16 % 3);
  for (const FormatSpec& format : {FormatSpec{Format::nvfp4}, FormatSpec{Format::sparse_nvfp4}}) {
    // So long along k that blocks share rows, and shorter.
    for (const std::int64_t k : {2056, 272}) {
      run_all({.format = format, .n = 440, .k = k, .sizes = sizes});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(PackedGemm, RowsOfEveryKind) {
  SHUNT_ON_GPU_ONLY();
  for (const FormatSpec& format :
       {FormatSpec{Format::nvfp4}, FormatSpec{Format::sparse_nvfp4}, FormatSpec{Format::dense3}}) {
    for (const DType rows : {DType::bf16, DType::f16, DType::f32}) {
      for (const bool odd : {false, true}) {
        for (const std::int64_t k : {8, 131, 328}) {
          run_all({.format = format,
                   .n = 200,
                   .k = k,
                   .sizes = {3, 0, 70, 1, 12},
                   .rows = rows,
                   .paired = true,
                   .rule = swiglu,
                   .gathered_from = 20,
                   .weighted = k == 131,
                   .odd_rows = odd});
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(PackedGemm, EveryEpilogue) {
  SHUNT_ON_GPU_ONLY();
  const std::vector<std::int32_t> sizes = {5, 0, 200, 33};
  const ActivationRule oss{
      .kind = ActivationRule::silu, .alpha = 1.702F, .limit = 0.7F, .up_offset = 1};
  const ActivationRule relu2{.kind = ActivationRule::relu2, .gated = false};
  for (const FormatSpec& format : {FormatSpec{Format::mxfp4}, FormatSpec{Format::fp8_block},
                                   FormatSpec{Format::int4, 32}, FormatSpec{Format::dense3}}) {
    for (const DType out : {DType::bf16, DType::f16, DType::f32}) {
      for (const std::int64_t gap : {0, 3, 16}) {
        run_all({.format = format,
                 .n = 152,
                 .k = 200,
                 .sizes = sizes,
                 .out = out,
                 .bias = true,
                 .weighted = gap == 3,
                 .out_gap = gap});
      }
      for (const auto& rule : {swiglu, oss, test::situ(), test::situ(0.3F, 1), test::situ(2, 0)}) {
        run_all({.format = format,
                 .n = 2 * 200,
                 .k = 136,
                 .sizes = sizes,
                 .out = out,
                 .bias = true,
                 .paired = true,
                 .rule = rule,
                 .weighted = rule.limit < 1 || rule.beta < 1});
      }
      run_all({.format = format,
               .n = 300,
               .k = 96,
               .sizes = sizes,
               .out = out,
               .bias = true,
               .rule = relu2});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(PackedGemm, LongSumsManyGroupsAndOne) {
  SHUNT_ON_GPU_ONLY();
  std::vector<std::int32_t> sizes;
  for (int g = 0; g < 300; ++g) sizes.push_back(g % 3 == 0 ? 0 : g == 100 ? 270 : g % 7 == 0);
  for (const FormatSpec& format : {FormatSpec{Format::nvfp4}, FormatSpec{Format::sparse_nvfp4},
                                   FormatSpec{Format::int8}, FormatSpec{Format::dense3}}) {
    run_all({.format = format, .n = 40, .k = 72, .sizes = sizes});
    run_all({.format = format, .n = 136, .k = 5000, .sizes = {0, 3, 17, 90}});  // rings go round
    run_all({.format = format, .n = 1544, .k = 136, .sizes = {600}});
    if (HasFatalFailure()) return;
  }
}

TEST(PackedGemm, AGraphFollowsOffsetsUnderEveryPlan) {
  SHUNT_ON_GPU_ONLY();
  for (const bool dependent : {false, true}) {
    const test::Stream stream;
    const Context context = cuda({.stream = stream.get(), .dependent_launch = dependent});
    const Problem one{.format = {Format::nvfp4}, .n = 264, .k = 640, .sizes = {150, 0, 10, 40}};
    Problem other = one;
    other.sizes = {1, 60, 139, 0};
    Made made(context, one), want(context, other);
    for (const PackedPlan& plan : made.plans()) {
      SCOPED_TRACE(cuda_engine::fragment_words(plan));
      const test::Graph graph(stream, [&] {
        for (int twice = 0; twice < 2; ++twice) {
          cuda_engine::multiply_as_planned(context.gpu(), plan, made.product);
        }
      });
      auto* const offsets = const_cast<std::int32_t*>(made.product.offsets);
      const std::vector<std::uint32_t> bits = want.run(plan);
      want.check(true);
      made.run(plan);
      context.copy(offsets, want.offsets.data(), want.offsets.size() * sizeof(std::int32_t));
      graph.replay();
      EXPECT_EQ(made.fetched(), bits);
      context.copy(offsets, made.offsets.data(), made.offsets.size() * sizeof(std::int32_t));
    }
  }
}

// Rows from the last to the first: a stride may be negative.
TEST(PackedGemm, RowsInReverse) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  const std::int64_t n = 136, k = 256;
  std::vector<std::pair<FormatSpec, RowFormat>> cases;
  for (const FormatSpec& format : every_format()) cases.emplace_back(format, RowFormat::as_dtype);
  cases.emplace_back(FormatSpec{Format::fp8_block}, RowFormat::fp8_block);
  cases.emplace_back(FormatSpec{Format::fp8_channel}, RowFormat::fp8_token);
  for (const auto& [format, rows] : cases) {
    if (rows != RowFormat::as_dtype && !test::on_hopper()) continue;
    const Packed matrix = Packed::of(format, normal_values(n * k, 4), n, k);
    const Buffer memory =
        context.allocate(prepared_bytes(context, DType::bf16, format, 1, n, k, false, rows));
    const PreparedWeights prepared =
        prepare_packed(context, DType::bf16, {matrix.packed}, memory, rows);
    const GroupedGemmSpec spec{
        .groups = 1, .n = n, .k = k, .dtype = DType::bf16, .format = format, .rows = rows};
    for (const std::int64_t count : {2, 5, 40, 300}) {
      SCOPED_TRACE(testing::Message()
                   << to_string(format) << ", " << count << " rows " << to_string(rows));
      const bool rounded = rows != RowFormat::as_dtype;
      const Array x = test::random_array(rounded ? DType::f8_e4m3 : DType::bf16, {count, k}, 5);
      const std::int64_t blocks = rows == RowFormat::fp8_block ? k / 128 : 1;
      std::vector<float> scales;
      for (std::int64_t r = 0; r < count * blocks; ++r) {
        scales.push_back(1 + static_cast<float>(r % 5));
      }
      const Tensor scale = !rounded      ? Tensor{}
                           : blocks == 1 ? view(scales.data(), {count})
                                         : view(scales.data(), {count, blocks});
      const std::vector<std::int32_t> offsets = {0, static_cast<std::int32_t>(count)};
      const auto product = [&](bool reversed) {
        const auto turned = [&](Tensor t) {
          if (!t || !reversed) return t;
          t.data = t.as<char>() + bytes(t.dtype, (count - 1) * t.strides[0]);
          t.strides[0] = -t.strides[0];
          return t;
        };
        Array out(DType::f32, {count, n});
        test::Mirror mirror(context);
        const Buffer workspace =
            context.allocate(grouped_gemm_workspace_bytes(context, spec, count));
        grouped_gemm(context, spec,
                     {.rows = mirror.in(turned(x.tensor)),
                      .offsets = mirror.in(view(offsets.data(), {2})),
                      .prepared = prepared,
                      .row_scales = mirror.in(turned(scale))},
                     mirror.out(out.tensor), workspace);
        mirror.fetch();
        return out;
      };
      const Array forward = product(false), backward = product(true);
      for (std::int64_t i = 0; i < count * n; ++i) {
        const std::int64_t r = i / n, j = i % n;
        const float wanted = forward.get((count - 1 - r) * n + j);
        ASSERT_NEAR(backward.get(i), wanted, 2e-3F * (1 + std::abs(wanted))) << r << ", " << j;
      }
    }
  }
}

// The public operation, and the way back.
TEST(PackedGemm, PreparedWeightsComeBackAndAreMultiplied) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  const std::int64_t n = 136, k = 264, rows = 5;
  for (const FormatSpec& format : every_format()) {
    SCOPED_TRACE(to_string(format));
    const Packed matrix = Packed::of(format, normal_values(n * k, 4), n, k);
    const Buffer memory = context.allocate(prepared_bytes(context, DType::bf16, format, 1, n, k));
    const PreparedWeights prepared = prepare_packed(context, DType::bf16, {matrix.packed}, memory);
    Array back(DType::f32, {n, k}), x = test::random_array(DType::bf16, {rows, k}, 5);
    Array out(DType::f32, {rows, n});
    std::vector<std::int32_t> offsets = {0, 5};
    test::Mirror mirror(context);
    unprepare(context, prepared, 0, mirror.out(back.tensor));
    GroupedGemmSpec spec{.groups = 1, .n = n, .k = k, .dtype = DType::bf16, .format = format};
    EXPECT_EQ(grouped_gemm_workspace_bytes(context, spec, rows), 0U);
    const GroupedGemmInputs in{.rows = mirror.in(x.tensor),
                               .offsets = mirror.in(view(offsets.data(), {2})),
                               .prepared = prepared};
    grouped_gemm(context, spec, in, mirror.out(out.tensor), {});
    mirror.fetch();
    const std::vector<float> exact = matrix.values();
    for (std::int64_t i = 0; i < n * k; ++i) {
      ASSERT_EQ(back.get(i), exact[static_cast<std::size_t>(i)]) << i;
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t j = 0; j < n; ++j) {
        double sum = 0, magnitude = 0;
        for (std::int64_t i = 0; i < k; ++i) {
          const double term =
              static_cast<double>(back.get(j * k + i)) * static_cast<double>(x.get(r * k + i));
          sum += term;
          magnitude += std::abs(term);
        }
        ASSERT_NEAR(static_cast<double>(out.get(r * n + j)), sum,
                    test::sum_bound(k, magnitude) + 3e-7 * std::abs(sum));
      }
    }
    if (cuda_engine::computed(format.format, RowFormat::fp8_block)) {
      spec.rows = RowFormat::fp8_block;  // which these are not laid out for
      EXPECT_THROW(grouped_gemm(context, spec, in, mirror.out(out.tensor), {}), Error);
    }
  }
}

}  // namespace
}  // namespace shunt
#endif
