// Every kernel and tile for packed weights on Hopper, against sums in double precision of the same
// rounded rows: ragged and empty groups, tails of every side, gathered rows, each epilogue.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "gemm/on_hopper.hpp"
#include "gemm/packed_data.hpp"
#include "gemm/packed_product.hpp"
#include "gemm/rule_reference.hpp"
#include "shunt/gemm.hpp"
#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"

namespace shunt {
namespace {

using cpu_engine::ActivationRule;
using cuda_engine::PackedPlan;
using test::Array;
using test::Fp8Matrix;
using test::Fp8Row;

struct Problem {
  Format format = Format::fp8_block;
  std::int64_t n = 0, k = 0;
  std::vector<std::int32_t> sizes;  // rows of each group
  DType rows = DType::f8_e4m3;      // else rounded on the way
  DType out = DType::bf16;          // f8_e4m3: with scales
  bool bias = false;
  bool paired = false;
  ActivationRule rule = {.kind = ActivationRule::identity, .gated = false};
  int gathered_from = 0;  // rows of the source; 0: not gathered
  bool weighted = false;  // rows times a weight, with whole_k before they are rounded
  bool whole_k = false;
  bool fast = false;         // fast_accumulation
  std::int64_t out_gap = 0;  // elements between rows of out
  bool odd_rows = false;     // of the source: not aligned
  float times = 8;           // every third row of the source
};

class Made {
 public:
  Made(const Context& context, const Problem& problem) : p(problem), context_(context) {
    const auto groups = static_cast<int>(p.sizes.size());
    const bool rounded = p.rows == DType::f8_e4m3;
    offsets.push_back(0);
    for (const auto size : p.sizes) offsets.push_back(offsets.back() + size);
    rows_ = offsets.back();
    const std::int64_t pitch = p.odd_rows ? p.k + 1 : (p.k + 15) / 16 * 16 + 16;
    source_rows_ = p.gathered_from > 0 ? p.gathered_from : rows_ + 3;
    Array x = test::random_array(rounded ? DType::f32 : p.rows, {source_rows_, p.k}, 1);
    for (std::int64_t r = 0; r < source_rows_; r += 3) {  // of very different sizes
      for (std::int64_t i = 0; i < p.k; ++i) x.set(r * p.k + i, x.get(r * p.k + i) * p.times);
    }
    x_ = std::make_unique<Array>(p.rows, std::initializer_list<std::int64_t>{source_rows_, pitch});
    for (std::int64_t i = 0; i < source_rows_ * pitch; ++i) x_->set(i, NAN);  // between rows
    const std::int64_t block = p.format == Format::fp8_block ? 128 : p.k;
    const std::int64_t blocks = (p.k + block - 1) / block;
    scales_ = std::make_unique<Array>(DType::f32,
                                      std::initializer_list<std::int64_t>{source_rows_, blocks});
    for (std::int64_t r = 0; r < rows_; ++r) {
      permutation_.push_back(
          p.gathered_from > 0 ? static_cast<std::int32_t>(r * 7 % (2 * p.gathered_from)) : 0);
      weights_.push_back(0.25f + static_cast<float>(r % 7));
    }
    for (std::int64_t r = 0; r < source_rows_; ++r) {
      std::vector<float> row;
      for (std::int64_t i = 0; i < p.k; ++i) row.push_back(x.get(r * p.k + i));
      const Fp8Row fp8(row, block);
      for (std::int64_t i = 0; i < p.k; ++i) {
        if (rounded) {
          static_cast<std::uint8_t*>(x_->tensor.data)[r * pitch + i] =
              fp8.bytes[static_cast<std::size_t>(i)];
        } else {
          x_->set(r * pitch + i, row[static_cast<std::size_t>(i)]);
        }
      }
      for (std::int64_t b = 0; b < blocks; ++b) {
        scales_->set(r * blocks + b, fp8.scales[static_cast<std::size_t>(b)]);
      }
      source_.push_back(row);
    }
    const std::int64_t each = p.paired ? p.n / 2 : p.n;
    std::vector<PackedMatrix> gate, up;
    for (int g = 0; g < groups; ++g) {
      matrices_.emplace_back(p.format, each, p.k, static_cast<unsigned>(2 * g + 10));
      gate.push_back(matrices_.back().matrix);
      if (!p.paired) continue;
      matrices_.emplace_back(p.format, each, p.k, static_cast<unsigned>(2 * g + 11));
      up.push_back(matrices_.back().matrix);
    }
    const FormatSpec format{.format = p.format};
    const RowFormat for_rows =
        p.format == Format::fp8_block ? RowFormat::fp8_block : RowFormat::fp8_token;
    memory_ = context.allocate(
        prepared_bytes(context, DType::bf16, format, groups, p.n, p.k, p.paired, for_rows));
    const PreparedWeights prepared =
        p.paired ? prepare_packed_paired(context, DType::bf16, gate, up, memory_, for_rows)
                 : prepare_packed(context, DType::bf16, gate, memory_, for_rows);
    bias_ = std::make_unique<Array>(test::random_array(DType::f32, {groups, p.n}, 3));
    columns_ = p.paired ? p.n / 2 : p.n;
    out_ = std::make_unique<Array>(
        p.out, std::initializer_list<std::int64_t>{rows_ + 3, columns_ + p.out_gap});
    out_scales_ = std::make_unique<Array>(
        DType::f32, std::initializer_list<std::int64_t>{rows_ + 3, (columns_ + 127) / 128});
    clear();
    mirror_ = std::make_unique<test::Mirror>(context);
    Tensor from = x_->tensor, out = out_->tensor;
    from.shape[1] = p.k;
    out.shape[1] = columns_;
    whole_ = mirror_->out(out_->tensor);  // first: views of it share its copy
    whole_scales_ = mirror_->out(out_scales_->tensor);
    Tensor row_scales = mirror_->in(scales_->tensor);
    if (p.format != Format::fp8_block) row_scales.rank = 1;
    product = {.layout = {p.format, p.n, p.k, p.paired},
               .groups = groups,
               .prepared = prepared.data,
               .offsets = mirror_->in(view(offsets.data(), {groups + 1})).as<const std::int32_t>(),
               .whole_k = p.whole_k,
               .fast_accumulation = p.fast,
               .rows = mirror_->in(from),
               .row_scales = rounded ? row_scales : Tensor{},
               .slots = p.gathered_from > 0 ? 2 : 1,
               .bias = p.bias ? mirror_->in(bias_->tensor) : Tensor{},
               .activation = p.rule,
               .out = mirror_->out(out)};
    if (p.out == DType::f8_e4m3) product.out_scales = whole_scales_;
    if (p.gathered_from > 0) {
      product.permutation =
          mirror_->in(view(permutation_.data(), {rows_})).as<const std::int32_t>();
    }
    if (p.weighted) product.row_scale = mirror_->in(view(weights_.data(), {rows_})).as<float>();
    expect(rounded, block);
  }

  std::vector<PackedPlan> plans() const {
    const auto all = cuda_engine::candidates(cuda_engine::sizes_of(product),
                                             cuda_engine::figures(context_.gpu()));
    return {all.begin(), all.end()};
  }
  void enqueue(const PackedPlan& plan) const {
    EXPECT_TRUE(cuda_engine::multiply_as_planned(context_.gpu(), plan, product));
  }
  // Runs it over a clean out.
  std::vector<std::uint32_t> run(const PackedPlan& plan) {
    clear();
    context_.copy(whole_.data, out_->tensor.data, static_cast<std::size_t>(out_->tensor.bytes()));
    enqueue(plan);
    return fetched();
  }
  std::vector<std::uint32_t> fetched() {
    mirror_->fetch();
    std::vector<std::uint32_t> all = out_->data;
    if (p.out == DType::f8_e4m3) {
      all.insert(all.end(), out_scales_->data.begin(), out_scales_->data.end());
    }
    return all;
  }
  void check() const {
    const std::int64_t pitch = columns_ + p.out_gap, blocks = (columns_ + 127) / 128;
    const bool fp8 = p.out == DType::f8_e4m3;
    for (std::int64_t r = 0; r < out_->tensor.shape[0]; ++r) {
      float most = 0;
      for (std::int64_t j = 0; j < pitch; ++j) {
        auto got = static_cast<double>(out_->get(r * pitch + j));
        if (r >= rows_ || j >= columns_) {
          ASSERT_EQ(got, 7) << "row " << r << ", column " << j << " is not out's";
          continue;
        }
        const auto at = static_cast<std::size_t>(r * columns_ + j);
        double bound = bound_[at];
        if (fp8) {
          // Rounded twice, and the largest of each 128 is as large as fp8 goes.
          const auto scale = static_cast<double>(out_scales_->get(r * blocks + j / 128));
          most = j % 128 == 0 ? 0 : most;
          most = std::max(most, static_cast<float>(std::abs(got)));
          if (j % 128 == 127 || j == columns_ - 1) {
            ASSERT_TRUE(most == 448 || most == 0) << "row " << r << ", column " << j;
          }
          got *= scale;
          bound += 0x1p-4 * (std::abs(want_[at]) + bound) + 0x1p-9 * scale;
        }
        ASSERT_NEAR(got, want_[at], bound) << "row " << r << ", column " << j;
      }
    }
  }

  Problem p;
  std::vector<std::int32_t> offsets;
  cuda_engine::PackedProduct product;

 private:
  void clear() {
    for (std::int64_t i = 0; i < out_->tensor.elements(); ++i) out_->set(i, 7);
  }
  void expect(bool rounded, std::int64_t block) {
    std::vector<double> sums(static_cast<std::size_t>(p.n)), bounds(sums.size());
    for (std::size_t g = 0; g < p.sizes.size(); ++g) {
      for (std::int64_t r = offsets[g]; r < offsets[g + 1]; ++r) {
        std::int64_t from = p.gathered_from > 0 ? permutation_[static_cast<std::size_t>(r)] / 2 : r;
        std::vector<float> row = source_[static_cast<std::size_t>(from)];
        const float weight = p.weighted ? weights_[static_cast<std::size_t>(r)] : 1;
        if (p.whole_k) {
          for (float& value : row) value *= weight;
        }
        const double of_sums = p.whole_k ? 1 : static_cast<double>(weight);
        const Fp8Row fp8(row, block);
        (void)rounded;
        for (std::int64_t j = 0; j < p.n; ++j) {
          const Fp8Matrix& m = p.paired ? matrices_[2 * g + (j >= p.n / 2)] : matrices_[g];
          const std::int64_t line = p.paired ? j % (p.n / 2) : j;
          double sum = 0, bound = 0, kept = 0;  // in the tensor cores, where it may stay
          for (std::int64_t begin = 0; begin < p.k; begin += 128) {
            double part = 0, largest = 0;
            for (std::int64_t i = begin; i < std::min(p.k, begin + 128); ++i) {
              const double term =
                  static_cast<double>(m.code(line, i)) *
                  static_cast<double>(e4m3_to_f32(fp8.bytes[static_cast<std::size_t>(i)]));
              part += term;
              if (p.fast) kept += term;
              largest = std::max({largest, std::abs(term), std::abs(part), std::abs(kept)});
            }
            const double scale =
                static_cast<double>(m.scale(line, begin)) *
                static_cast<double>(fp8.scales[static_cast<std::size_t>(begin / block)]);
            sum += part * scale;
            bound += (test::fp8_step_bound(largest) + 1e-6 * std::abs(part)) * scale +
                     1e-6 * std::abs(sum);
          }
          sum *= of_sums, bound *= of_sums;
          if (p.bias)
            sum += static_cast<double>(bias_->get(static_cast<std::int64_t>(g) * p.n + j));
          sums[static_cast<std::size_t>(j)] = sum;
          bounds[static_cast<std::size_t>(j)] = bound + 1e-6 * std::abs(sum);
        }
        for (std::int64_t j = 0; j < columns_; ++j) {
          const auto a = static_cast<std::size_t>(j), b = static_cast<std::size_t>(columns_ + j);
          double value = sums[a], bound = bounds[a];
          if (p.paired) {
            value = test::activate(p.rule, sums[a], sums[b]);
            bound = 2 * (bounds[a] + bounds[b]) * (1 + std::abs(sums[a]) + std::abs(sums[b]));
          } else if (p.rule.kind != ActivationRule::identity) {
            value = test::activate(p.rule, 0, sums[a]);
            bound *= 2 * (1 + std::abs(sums[a]));
          }
          want_.push_back(value);
          bound_.push_back(bound + 0x1p-8 * std::abs(value) * 1.01 + 1e-6);
        }
      }
    }
  }

  Context context_;
  std::int64_t rows_ = 0, source_rows_ = 0, columns_ = 0;
  std::unique_ptr<Array> x_, scales_, bias_, out_, out_scales_;
  std::vector<std::vector<float>> source_;
  std::vector<Fp8Matrix> matrices_;
  std::vector<std::int32_t> permutation_;
  std::vector<float> weights_;
  Buffer memory_;
  std::unique_ptr<test::Mirror> mirror_;
  Tensor whole_, whole_scales_;
  std::vector<double> want_, bound_;
};

// Every plan; those that do not split k give the same bits, and each the same bits again. With fast
// accumulation the kernel for many rows may have others.
void run_all(const Problem& problem) {
  const Context context = cuda();
  Made made(context, problem);
  const auto plans = made.plans();
  ASSERT_GE(plans.size(), 1U);
  std::vector<std::uint32_t> first;
  for (const PackedPlan& plan : plans) {
    SCOPED_TRACE(describe(plan) + " of [" + std::to_string(problem.n) + ", " +
                 std::to_string(problem.k) + "]");
    const std::vector<std::uint32_t> bits = made.run(plan);
    made.check();
    if (::testing::Test::HasFatalFailure()) return;
    EXPECT_EQ(made.run(plan), bits) << "again";
    if (plan.split > 1 || (problem.fast && plan.kernel == PackedPlan::many_rows)) continue;
    if (first.empty()) first = bits;
    EXPECT_EQ(bits, first) << "other bits than the first plan's";
  }
}

const ActivationRule swiglu{.kind = ActivationRule::silu};

TEST(Fp8Gemm, RaggedGroupsAndTails) {
  SHUNT_ON_HOPPER_ONLY();
  const std::vector<std::int32_t> ragged = {0, 1, 130, 0, 64, 65, 7, 0, 0, 300, 16, 9};
  for (const Format format : {Format::fp8_block, Format::fp8_channel, Format::fp8_tensor}) {
    for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{128, 128},
                               {256, 256},
                               {72, 104},
                               {264, 640},
                               {8, 16},
                               {130, 264},
                               {1, 8},
                               {520, 304}}) {
      run_all({.format = format, .n = n, .k = k, .sizes = ragged});
    }
  }
}

TEST(Fp8Gemm, RowsAreRoundedOnTheWay) {
  SHUNT_ON_HOPPER_ONLY();
  for (const DType rows : {DType::bf16, DType::f16, DType::f32}) {
    for (const bool odd : {false, true}) {
      for (const std::int64_t k : {8, 104, 328, 1155}) {
        run_all({.n = 200,
                 .k = k,
                 .sizes = {3, 0, 70, 1, 12},
                 .rows = rows,
                 .paired = true,
                 .rule = swiglu,
                 .gathered_from = 20,
                 .weighted = k != 8,
                 .whole_k = k == 104,
                 .odd_rows = odd});
      }
    }
  }
  // Magnitudes above 1e30, whose scales are found another way, beside others.
  for (const DType rows : {DType::bf16, DType::f32}) {
    run_all({.n = 136, .k = 328, .sizes = {3, 0, 70}, .rows = rows, .times = 0x1p108F});
  }
  run_all({.n = 136, .k = 200, .sizes = {3, 0, 70}, .odd_rows = true});
  run_all({.n = 136, .k = 200, .sizes = {3, 0, 70}, .gathered_from = 9});
}

TEST(Fp8Gemm, WidthsOfModels) {
  SHUNT_ON_HOPPER_ONLY();
  for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{2880, 1408}, {768, 2880}}) {
    run_all({.n = n, .k = k, .sizes = {0, 3, 17, 0, 190}});
  }
}

TEST(Fp8Gemm, ManyGroupsAndOne) {
  SHUNT_ON_HOPPER_ONLY();
  std::vector<std::int32_t> sizes;
  for (int g = 0; g < 1000; ++g) sizes.push_back(g % 3 == 0 ? 0 : g == 500 ? 270 : g % 7 == 0);
  run_all({.n = 40, .k = 72, .sizes = sizes});
  run_all({.n = 1544, .k = 136, .sizes = {1500}});  // bands of row tiles
  run_all({.n = 648, .k = 136, .sizes = {2100, 150, 513, 0, 700, 2048, 192}});  // and rests
}

// Whatever a tile ends in: plain results, pairs, and to f32, which has no form for it.
TEST(Fp8Gemm, FastAccumulation) {
  SHUNT_ON_HOPPER_ONLY();
  const std::vector<std::int32_t> ragged = {0, 1, 130, 0, 64, 65, 7, 300, 16, 200, 128};
  for (const auto& [n, k] :
       {std::pair<std::int64_t, std::int64_t>{264, 640}, {72, 104}, {520, 304}, {1, 8}}) {
    for (const DType out : {DType::bf16, DType::f32}) {
      run_all({.format = Format::fp8_channel,
               .n = n,
               .k = k,
               .sizes = ragged,
               .out = out,
               .fast = true});
    }
    run_all({.format = Format::fp8_tensor,
             .n = 2 * ((n + 7) / 8 * 8),
             .k = k,
             .sizes = ragged,
             .paired = true,
             .rule = swiglu,
             .fast = true});
  }
}

// Sums of 2880 products do not round as sums of sums of 128 do, or the kernel is not the fast one.
TEST(Fp8Gemm, FastAccumulationIsAnotherSum) {
  SHUNT_ON_HOPPER_ONLY();
  const Context context = cuda();
  Problem problem{.format = Format::fp8_channel, .n = 256, .k = 2880, .sizes = {200, 64, 30}};
  for (const bool paired : {false, true}) {
    problem.paired = paired;
    if (paired) problem.rule = swiglu;
    std::vector<std::uint32_t> bits[2];
    for (const bool fast : {false, true}) {
      problem.fast = fast;
      Made made(context, problem);
      for (const PackedPlan& plan : made.plans()) {
        if (plan.kernel == PackedPlan::many_rows) bits[fast] = made.run(plan);
      }
    }
    ASSERT_FALSE(bits[0].empty());
    ASSERT_FALSE(bits[1].empty());
    EXPECT_NE(bits[0], bits[1]);
  }
}

TEST(Fp8Gemm, EveryEpilogue) {
  SHUNT_ON_HOPPER_ONLY();
  const std::vector<std::int32_t> sizes = {5, 0, 200, 33};
  const ActivationRule oss{
      .kind = ActivationRule::silu, .alpha = 1.702f, .limit = 0.7f, .up_offset = 1};
  const ActivationRule gelu{.kind = ActivationRule::gelu};
  const ActivationRule relu2{.kind = ActivationRule::relu2, .gated = false};
  for (const DType out : {DType::bf16, DType::f16, DType::f32, DType::f8_e4m3}) {
    for (const std::int64_t gap : {0, 3, 16}) {
      run_all({.n = 152, .k = 200, .sizes = sizes, .out = out, .bias = true, .out_gap = gap});
    }
    for (const auto& rule : {swiglu, oss, gelu, test::situ(), test::situ(0.3f, 1)}) {
      for (const Format format : {Format::fp8_block, Format::fp8_channel}) {
        run_all({.format = format,
                 .n = 2 * 300,
                 .k = 136,
                 .sizes = sizes,
                 .out = out,
                 .bias = true,
                 .paired = true,
                 .rule = rule});
      }
    }
    run_all({.n = 2 * 256, .k = 96, .sizes = sizes, .out = out, .paired = true, .rule = swiglu});
    run_all({.n = 300, .k = 96, .sizes = sizes, .out = out, .bias = true, .rule = relu2});
  }
  for (const std::int64_t n : {2 * 416, 2 * 64}) {  // pairs that become fp8, of whole vectors
    run_all({.n = n,
             .k = 640,
             .sizes = {5, 0, 200, 33, 64, 129, 530, 100},
             .out = DType::f8_e4m3,
             .paired = true,
             .rule = swiglu});
  }
}

TEST(Fp8Gemm, AGraphFollowsOffsetsUnderEveryPlan) {
  SHUNT_ON_HOPPER_ONLY();
  for (const bool dependent : {false, true}) {
    const test::Stream stream;
    const Context context = cuda({.stream = stream.get(), .dependent_launch = dependent});
    const Problem one{.n = 264, .k = 640, .sizes = {150, 0, 10, 40}};
    const Problem other{.n = 264, .k = 640, .sizes = {1, 60, 139, 0}};
    Made made(context, one), want(context, other);
    for (const PackedPlan& plan : made.plans()) {
      SCOPED_TRACE(describe(plan));
      const test::Graph graph(stream, [&] {
        for (int twice = 0; twice < 2; ++twice) made.enqueue(plan);
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

// Another stream's kernels on the same multiprocessors slow a block's warps as they come: what one
// waits too little for shows.
TEST(Fp8Gemm, AnotherStreamsKernelsLeaveTheBitsAlone) {
  SHUNT_ON_HOPPER_ONLY();
  constexpr std::int64_t n = 2816, k = 2048, beside_rows = 48;  // of DeepSeek-V2-Lite
  constexpr int rounds = 200;
  const test::Stream stream, other_stream;
  std::vector<std::int32_t> sizes;
  for (int g = 0; g < 24; ++g) sizes.push_back(1 + g * 5 % 9);
  Made made(cuda({.stream = stream.get()}), {.n = n,
                                             .k = k,
                                             .sizes = sizes,
                                             .rows = DType::bf16,
                                             .paired = true,
                                             .rule = swiglu,
                                             .gathered_from = 64});

  const Context other = cuda({.stream = other_stream.get()});
  const GroupedGemmSpec spec{.groups = 1, .n = n, .k = k, .dtype = DType::bf16};
  const Array x = test::random_array(DType::bf16, {beside_rows, k}, 5);
  const Array w = test::random_array(DType::bf16, {1, n, k}, 6);
  Array y(DType::bf16, {beside_rows, n});
  const std::vector<std::int32_t> offsets = {0, beside_rows};
  const Buffer memory = other.allocate(prepared_bytes(other, spec.dtype, 1, n, k));
  const Buffer workspace = other.allocate(grouped_gemm_workspace_bytes(other, spec, beside_rows));
  test::Mirror mirror(other);
  const GroupedGemmInputs in{.rows = mirror.in(x.tensor),
                             .offsets = mirror.in(view(offsets.data(), {2})),
                             .prepared = prepare(other, spec.dtype, {w.tensor[0]}, memory)};
  const Tensor out = mirror.out(y.tensor);
  grouped_gemm(other, spec, in, out, workspace);
  mirror.fetch();
  const std::vector<std::uint32_t> alone = y.data;

  int differ_beside = 0;
  for (const PackedPlan& plan : made.plans()) {
    SCOPED_TRACE(describe(plan));
    const std::vector<std::uint32_t> bits = made.run(plan);
    made.check();
    int differ = 0;
    for (int round = 0; round < rounds; ++round) {
      for (int i = 0; i < 6; ++i) grouped_gemm(other, spec, in, out, workspace);
      made.enqueue(plan);
      differ += made.fetched() != bits;
      mirror.fetch();
      differ_beside += y.data != alone;
    }
    EXPECT_EQ(differ, 0) << "of " << rounds << " calls";
  }
  EXPECT_EQ(differ_beside, 0) << "calls of the other stream";
}

// The public operation, and the way back.
TEST(Fp8Gemm, PreparedWeightsComeBackAndAreMultiplied) {
  SHUNT_ON_HOPPER_ONLY();
  const Context context = cuda();
  const std::int64_t n = 136, k = 264, rows = 5;
  const Fp8Matrix matrix(Format::fp8_block, n, k, 4);
  const FormatSpec format{.format = Format::fp8_block};
  const Buffer memory = context.allocate(
      prepared_bytes(context, DType::bf16, format, 1, n, k, false, RowFormat::fp8_block));
  const PreparedWeights prepared =
      prepare_packed(context, DType::bf16, {matrix.matrix}, memory, RowFormat::fp8_block);
  Array back(DType::f32, {n, k}), x = test::random_array(DType::bf16, {rows, k}, 5);
  Array out(DType::f32, {rows, n});
  std::vector<std::int32_t> offsets = {0, 5};
  test::Mirror mirror(context);
  unprepare(context, prepared, 0, mirror.out(back.tensor));
  const GroupedGemmSpec spec{.groups = 1,
                             .n = n,
                             .k = k,
                             .dtype = DType::bf16,
                             .format = format,
                             .rows = RowFormat::fp8_block};
  EXPECT_EQ(grouped_gemm_workspace_bytes(context, spec, rows), 0U);
  grouped_gemm(context, spec,
               {.rows = mirror.in(x.tensor),
                .offsets = mirror.in(view(offsets.data(), {2})),
                .prepared = prepared},
               mirror.out(out.tensor), {});
  mirror.fetch();
  for (std::int64_t i = 0; i < n * k; ++i) {
    ASSERT_EQ(back.get(i), matrix.code(i / k, i % k) * matrix.scale(i / k, i % k)) << i;
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
      // Each number of the row is within half a unit of its last place, or of the smallest.
      ASSERT_NEAR(static_cast<double>(out.get(r * n + j)), sum, magnitude * 0.07);
    }
  }
}

}  // namespace
}  // namespace shunt
#endif
