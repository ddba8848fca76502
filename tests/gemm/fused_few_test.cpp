// Both products of the experts' few rows in one launch on Hopper, in every form of weights and
// every size of unit, beside the two products one after the other (whose own tests compare them
// with sums in double precision): ragged and empty groups, more rows than a unit takes, tails of
// every side, gathered, converted and weighted rows.
#include "gemm/fused_few.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "engine.hpp"
#include "format/plain.hpp"
#include "gemm/fragment_prepare.hpp"
#include "gemm/gemm_data.hpp"
#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"

namespace shunt {
namespace {

using cpu_engine::ActivationRule;
using cuda_engine::FusedPlan;
using test::Array;

#define SHUNT_ON_HOPPER_ONLY()                                             \
  if (!test::on_gpu() || cuda_engine::figures(cuda().gpu()).compute != 90) \
  GTEST_SKIP() << "about Hopper's kernels"

struct Problem {
  FormatSpec format{};  // plain too
  DType dtype = DType::bf16;
  std::int64_t hidden = 256, inner = 128;
  std::vector<std::int32_t> sizes;  // rows of each group
  DType rows = DType::bf16;         // of the input
  bool weighted = false, bias = false;
  ActivationSpec activation{};
};

// The experts' weights, their rows, and both ways from the rows to results.
class Made {
 public:
  Made(const Context& context, const Problem& problem) : p(problem), context_(context) {
    groups_ = static_cast<int>(p.sizes.size());
    std::vector<std::int32_t> offsets{0};
    for (const auto size : p.sizes) offsets.push_back(offsets.back() + size);
    rows_ = offsets.back();
    const std::int64_t up_rows = p.activation.gated ? 2 * p.inner : p.inner;
    gate_up_ = matrices(up_rows, p.hidden, p.activation.gated, 10);
    down_ = matrices(p.hidden, p.inner, false, 50);
    const std::int64_t tokens = rows_ / 2 + 3;
    std::vector<std::int32_t> permutation;
    std::vector<float> weights;
    for (std::int64_t r = 0; r < rows_; ++r) {
      permutation.push_back(static_cast<std::int32_t>(r * 7 % (2 * tokens)));
      weights.push_back(0.25F + static_cast<float>(r % 7) / 4);
    }
    const Array x = test::random_array(p.rows, {tokens, p.hidden}, 1);
    const Array gate_up_bias = test::random_array(DType::f32, {groups_, up_rows}, 3);
    const Array down_bias = test::random_array(DType::f32, {groups_, p.hidden}, 4);
    mirror_ = std::make_unique<test::Mirror>(context);
    counters_ = context.allocate(static_cast<std::size_t>(4 * (1 + rows_)));
    h_ = std::make_unique<Array>(p.dtype, std::initializer_list<std::int64_t>{rows_, p.inner});
    out_ =
        std::make_unique<Array>(DType::f32, std::initializer_list<std::int64_t>{rows_, p.hidden});
    in = {.rows = mirror_->in(x.tensor),
          .offsets = mirror_->in(view(offsets.data(), {groups_ + 1})).as<const std::int32_t>(),
          .permutation = mirror_->in(view(permutation.data(), {rows_})).as<const std::int32_t>(),
          .slots = 2,
          .row_scale =
              p.weighted ? mirror_->in(view(weights.data(), {rows_})).as<const float>() : nullptr,
          .bias = p.bias ? mirror_->in(gate_up_bias.tensor).as<const float>() : nullptr};
    down_bias_ = p.bias ? mirror_->in(down_bias.tensor).as<const float>() : nullptr;
    h = mirror_->out(h_->tensor);
    out = mirror_->out(out_->tensor);
  }

  std::vector<FusedPlan> plans() const {
    const auto list = mlp_both_plans(context_, gate_up_, down_, rows_);
    return {list.begin(), list.end()};
  }
  struct Results {
    std::vector<std::uint32_t> h, out;
    std::vector<float> h_values, out_values;
  };
  Results one_after_the_other() {
    clear();
    mlp_gate_up(context_, gate_up_, p.activation, in, h, {});
    mlp_gemm(context_, down_, {.rows = h, .offsets = in.offsets, .bias = down_bias_}, out, {});
    return fetched();
  }
  void enqueue(const FusedPlan& plan) const {
    mlp_both(context_, gate_up_, down_, p.activation, in, h, down_bias_, out,
             static_cast<std::uint32_t*>(counters_.data()), &plan);
  }
  Results at_once(const FusedPlan& plan) {
    clear();
    enqueue(plan);
    return fetched();
  }
  void clear() {
    const std::vector<std::uint32_t> zeros(static_cast<std::size_t>(1 + rows_));
    context_.copy(counters_.data(), zeros.data(), zeros.size() * 4);
    for (Array* const a : {h_.get(), out_.get()}) {
      for (std::int64_t i = 0; i < a->tensor.elements(); ++i) a->set(i, NAN);
    }
    context_.copy(h.data, h_->tensor.data, static_cast<std::size_t>(h_->tensor.bytes()));
    context_.copy(out.data, out_->tensor.data, static_cast<std::size_t>(out_->tensor.bytes()));
  }
  Results fetched() {
    mirror_->fetch();
    Results results{h_->data, out_->data, {}, {}};
    for (std::int64_t i = 0; i < h_->tensor.elements(); ++i) results.h_values.push_back(h_->get(i));
    for (std::int64_t i = 0; i < out_->tensor.elements(); ++i) {
      results.out_values.push_back(out_->get(i));
    }
    return results;
  }

  Problem p;
  MlpInput in;
  Tensor h, out;

 private:
  PreparedWeights matrices(std::int64_t n, std::int64_t k, bool paired, unsigned seed) {
    const float usual = 1 / std::sqrt(static_cast<float>(k));
    const std::int64_t each = paired ? n / 2 : n;
    const bool plain = p.format == FormatSpec{};
    memory_.push_back(context_.allocate(
        plain ? prepared_bytes(context_, p.dtype, groups_, n, k, paired)
              : prepared_bytes(context_, p.dtype, p.format, groups_, n, k, paired)));
    std::vector<Array> arrays;
    std::vector<Packed> packed;
    std::vector<Tensor> lists[2];
    std::vector<PackedMatrix> packed_lists[2];
    for (int g = 0; g < groups_; ++g) {
      for (int side = 0; side < (paired ? 2 : 1); ++side) {
        const auto of = static_cast<unsigned>(2 * (g % 3) + side) + seed;  // packing is slow
        if (plain) {
          arrays.push_back(test::random_array(p.dtype, {each, k}, of));
          Array& a = arrays.back();
          for (std::int64_t i = 0; i < each * k; ++i) a.set(i, a.get(i) * usual);
        } else {
          packed.push_back(Packed::of(p.format, normal_values(each * k, of, usual), each, k));
        }
      }
    }
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      lists[paired ? i % 2 : 0].push_back(arrays[i].tensor);
    }
    for (std::size_t i = 0; i < packed.size(); ++i) {
      packed_lists[paired ? i % 2 : 0].push_back(packed[i].packed);
    }
    if (plain) {
      return paired ? prepare_paired(context_, p.dtype, lists[0], lists[1], memory_.back())
                    : prepare(context_, p.dtype, lists[0], memory_.back());
    }
    return paired ? prepare_packed_paired(context_, p.dtype, packed_lists[0], packed_lists[1],
                                          memory_.back())
                  : prepare_packed(context_, p.dtype, packed_lists[0], memory_.back());
  }

  Context context_;
  int groups_ = 0;
  std::int64_t rows_ = 0;
  std::vector<Buffer> memory_;
  PreparedWeights gate_up_, down_;
  Buffer counters_;
  const float* down_bias_ = nullptr;
  std::unique_ptr<test::Mirror> mirror_;
  std::unique_ptr<Array> h_, out_;
};

// Sums of the same terms in another order, rounded once (h) and again by way of h (out).
void near(const std::vector<float>& got, const std::vector<float>& want, double relative,
          const char* what) {
  ASSERT_EQ(got.size(), want.size());
  double square = 0;
  for (const float x : want) square += static_cast<double>(x) * static_cast<double>(x);
  const double usual =
      std::sqrt(square / static_cast<double>(std::max<std::size_t>(1, want.size())));
  ASSERT_GT(usual, 0) << what;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const auto w = static_cast<double>(want[i]);
    ASSERT_NEAR(static_cast<double>(got[i]), w, relative * (std::abs(w) + usual))
        << what << " " << i;
  }
}

void run_all(const Problem& problem) {
  const Context context = cuda();
  Made made(context, problem);
  const auto plans = made.plans();
  ASSERT_GE(plans.size(), 4U);
  const Made::Results want = made.one_after_the_other();
  const double rounding = problem.dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  for (const FusedPlan& plan : plans) {
    SCOPED_TRACE(testing::Message()
                 << describe(plan) << ", " << to_string(problem.format) << " "
                 << to_string(problem.dtype) << " " << problem.hidden << " x " << problem.inner);
    const Made::Results got = made.at_once(plan);
    near(got.h_values, want.h_values, 2.02 * rounding, "h");  // one unit
    // An h that is one unit off in a few places moves a sum of many by much less.
    near(got.out_values, want.out_values, rounding, "out");
    if (testing::Test::HasFatalFailure()) return;
    const Made::Results again = made.at_once(plan);
    EXPECT_EQ(got.h, again.h);
    EXPECT_EQ(got.out, again.out);
  }
}

std::vector<FormatSpec> forms() {
  std::vector<FormatSpec> list{FormatSpec{}};
  for (const FormatSpec& spec : known_formats()) {
    if (cuda_engine::FragmentLayout::holds(spec.format)) list.push_back(spec);
  }
  for (const int group : {16, 64, 128}) list.push_back({Format::int4, group});
  return list;
}

TEST(FusedFew, EveryFormOfWeights) {
  SHUNT_ON_HOPPER_ONLY();
  for (const FormatSpec& format : forms()) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      run_all({.format = format,
               .dtype = dtype,
               .hidden = 384,
               .inner = 256,
               .sizes = {0, 1, 3, 0, 8, 2},
               .rows = dtype});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(FusedFew, TailsOfEverySide) {
  SHUNT_ON_HOPPER_ONLY();
  for (const auto& [hidden, inner] : {std::pair{320, 192}, {64, 1088}, {2880, 96}, {1100, 72}}) {
    run_all({.hidden = hidden, .inner = inner, .sizes = {9, 0, 20, 1}});
    if (HasFatalFailure()) return;
    run_all({.format = {Format::nvfp4},
             .hidden = hidden - hidden % 16,
             .inner = inner - inner % 16,
             .sizes = {9, 0, 20, 1}});
    if (HasFatalFailure()) return;
  }
}

TEST(FusedFew, RowsAndEpilogues) {
  SHUNT_ON_HOPPER_ONLY();
  const ActivationSpec gpt_oss{.alpha = 1.702F, .limit = 7, .up_offset = 1};
  const ActivationSpec relu2{.kind = Activation::relu2, .gated = false};
  for (const ActivationSpec& activation : {ActivationSpec{}, gpt_oss, relu2}) {
    for (const FormatSpec& format : {FormatSpec{}, FormatSpec{Format::mxfp4}}) {
      for (const DType rows : {DType::bf16, DType::f32, DType::f16}) {
        run_all({.format = format,
                 .hidden = 512,
                 .inner = 128,
                 .sizes = {2, 5},
                 .rows = rows,
                 .weighted = rows != DType::bf16,
                 .bias = rows != DType::f16,
                 .activation = activation});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// As many groups as models have, most of them without a row, and as many rows as it takes.
TEST(FusedFew, ManyGroups) {
  SHUNT_ON_HOPPER_ONLY();
  std::vector<std::int32_t> sizes(512);
  for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = i % 11 == 3 ? 1 : i % 97 == 0 ? 13 : 0;
  run_all({.hidden = 256, .inner = 64, .sizes = sizes});
  run_all({.hidden = 128, .inner = 64, .sizes = {0, 1000, 24}});
}

TEST(FusedFew, AGraphFollowsOffsets) {
  SHUNT_ON_HOPPER_ONLY();
  const test::Stream stream;
  const Context context = cuda({.stream = stream.get()});
  Made made(context, {.hidden = 512, .inner = 256, .sizes = {4, 4, 4, 4}});
  const std::vector<FusedPlan> plans = made.plans();
  made.clear();
  const test::Graph graph(stream, [&] { made.enqueue(plans.front()); });
  for (const std::vector<std::int32_t>& offsets :
       {std::vector<std::int32_t>{0, 4, 8, 12, 16}, {0, 0, 16, 16, 16}, {0, 1, 2, 14, 16}}) {
    context.copy(const_cast<std::int32_t*>(made.in.offsets), offsets.data(), 20);
    const Made::Results want = made.one_after_the_other();
    made.clear();
    graph.replay();
    const Made::Results got = made.fetched();
    near(got.h_values, want.h_values, 0x1.04p-7, "h");
    near(got.out_values, want.out_values, 0x1p-8, "out");
  }
}

}  // namespace
}  // namespace shunt
#endif
