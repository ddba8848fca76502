// A token's bits in batches of any size and company, with LayerOptions::batch_invariant.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "engine.hpp"
#include "gemm/on_hopper.hpp"
#include "layer/random_layer.hpp"
#include "layer/run_layer.hpp"
#include "shunt/layer.hpp"
#if SHUNT_CUDA_BUILT
#include "gemm/h200.hpp"
#endif

namespace shunt {
namespace {

using testing::RandomLayer;
using testing::Result;
using testing::run;
using testing::small_layer;

template <class T>
bool same(const std::vector<T>& part, std::int64_t at, const std::vector<T>& all, std::int64_t from,
          std::int64_t rows, std::int64_t width) {
  return std::memcmp(part.data() + at * width, all.data() + from * width,
                     static_cast<std::size_t>(rows * width) * sizeof(T)) == 0;
}

// Products whose k a GPU would share out for few rows, and routers of every form.
std::vector<LayerSpec> specs() {
  LayerSpec wide = small_layer({.experts = 16, .top_k = 4, .renormalize = true}, 1024, 256);
  wide.shared = {.intermediate = 512, .sigmoid_gate = true};
  LayerSpec soft = small_layer({.experts = 128, .top_k = 8}, 512, 64);
  soft.output_norm = {.enabled = true, .weight = true};
  LayerSpec grouped =
      small_layer({.experts = 256,
                   .top_k = 8,
                   .score = Score::sigmoid,
                   .selection_bias = true,
                   .groups = {.count = 8, .keep = 4, .rank_by = GroupRank::sum_of_top_2},
                   .renormalize = true,
                   .scale = 2.5F},
                  256, 32);
  LayerSpec many = small_layer({.experts = 600, .top_k = 6}, 128, 16);
  LayerSpec latent = small_layer({.experts = 16, .top_k = 3}, 512, 256,
                                 {.kind = Activation::situ, .beta = 4, .linear_beta = 25});
  latent.latent = latent.experts.hidden = 384;
  latent.latent_norm = {.enabled = true, .weight = true};
  return {wide, soft, grouped, many, latent};
}

std::vector<LayerOptions> options(const LayerSpec& spec) {
  std::vector<LayerOptions> all = {{.dtype = DType::bf16}, {.dtype = DType::f32}};
  if (spec.route.experts == 16) {
    if (!test::on_gpu()) {
      all.push_back({.dtype = DType::bf16, .format = {Format::mxfp4}});
      all.push_back({.dtype = DType::f16, .format = {Format::fp8_block}});
    } else {  // where several kernels take each
      for (const FormatSpec& format : known_formats()) {
        all.push_back({.dtype = DType::bf16, .format = format});
        if (spec.latent == 0) all.push_back({.dtype = DType::f16, .format = format});
      }
      all.push_back({.dtype = DType::bf16, .format = {Format::int4, 128}});
    }
    if (test::on_hopper()) {
      all.push_back(
          {.dtype = DType::f16, .format = {Format::fp8_block}, .rows = RowFormat::fp8_block});
    }
  }
  for (LayerOptions& each : all) each.batch_invariant = true;
  return all;
}

TEST(BatchInvariant, ATokensBitsDoNotDependOnTheOthers) {
  const Context context = test::engine();
  unsigned seed = 61;
  for (const LayerSpec& spec : specs()) {
    RandomLayer random(spec, seed++);
    constexpr std::int64_t most = 700;
    for (const LayerOptions& with : options(spec)) {
      const Layer layer(spec, random.weights, context, with);
      // From hidden states, and from logits, a gate alone.
      const Tensor x = random.hidden_states(most, with.dtype);
      const Tensor given = random.matrix(most, spec.route.columns(), 1);
      for (const Tensor& logits : {Tensor{}, given}) {
        const auto rows_of = [&](std::int64_t from, std::int64_t upto) {
          return LayerInputs{.hidden = x.rows(from, upto),
                             .logits = logits ? logits.rows(from, upto) : Tensor{}};
        };
        const Result all = run(context, layer, rows_of(0, most));
        for (const std::int64_t tokens : {1, 2, 3, 8, 16, 17, 31, 64, 130, 257}) {
          for (const std::int64_t from : {std::int64_t{0}, most / 2, most - tokens}) {
            SCOPED_TRACE(std::to_string(spec.route.experts) + " experts, " + to_string(with.dtype) +
                         ", " + to_string(with.format) + ", " + std::to_string(tokens) + " from " +
                         std::to_string(from) + (logits ? ", from logits" : ""));
            const Result some = run(context, layer, rows_of(from, from + tokens));
            EXPECT_TRUE(same(some.ids, 0, all.ids, from, tokens, spec.route.top_k)) << "ids";
            EXPECT_TRUE(same(some.weights, 0, all.weights, from, tokens, spec.route.top_k))
                << "weights";
            EXPECT_TRUE(same(some.output, 0, all.output, from, tokens, spec.hidden)) << "output";
          }
        }
      }
    }
  }
}

#if SHUNT_CUDA_BUILT
// Of the first of those specs, 700 tokens are a kernel's for many rows wherever they may be, and
// what is compared with them a kernel's for few.
TEST(BatchInvariant, TokensAreSoManyThatKernelsDiffer) {
  using cuda_engine::PackedPlan;
  const LayerSpec spec = specs().front();
  const std::int64_t columns = 2 * spec.experts.intermediate;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const FormatSpec& format : known_formats()) {
      const cuda_engine::FragmentLayout layout{resolved(format), dtype, columns, spec.hidden, true};
      for (const bool gathered : {false, true}) {
        SCOPED_TRACE(to_string(format) + ", " + to_string(dtype) + (gathered ? ", gathered" : ""));
        const auto sizes = [&](std::int64_t tokens) {
          cuda_engine::PackedSizes of =
              cuda_engine::sizes_of(layout, spec.experts.experts, tokens * spec.route.top_k);
          of.whole_k = true;
          of.rows_in_place = gathered;
          return of;
        };
        const auto kernel = [&](std::int64_t tokens) {
          return cuda_engine::plan_fragments(sizes(tokens), cuda_engine::h200).kernel;
        };
        EXPECT_EQ(kernel(257), PackedPlan::few_rows);
        // Where scales join the sums, kernels differ.
        const bool apart = format.format == Format::int4 || format.format == Format::dense3 ||
                           format.format == Format::fp8_block;
        EXPECT_EQ(kernel(700), apart ? PackedPlan::few_rows : PackedPlan::many_rows);
      }
    }
  }
}
// Kernels for many rows activate pairs otherwise where no bulk store reaches their results.
TEST(BatchInvariant, PairsOfOddSizesStayWithFewRows) {
  for (const std::int64_t intermediate : {100, 104}) {
    const cuda_engine::FragmentLayout layout{resolved({Format::nvfp4}), DType::bf16,
                                             2 * intermediate, 256, true};
    EXPECT_EQ(cuda_engine::sizes_of(layout, 4, 64).same_sums, intermediate == 104);
  }
}
TEST(BatchInvariant, PairsThatNoBulkStoreReachesStayWithFewRows) {
  alignas(16) static std::uint16_t results[64 * 112];
  const auto same = [](DType dtype, std::int64_t stride, std::int64_t first) {
    cuda_engine::FragmentProduct product;
    product.layout = {resolved({Format::nvfp4}), DType::bf16, 208, 256, true};
    product.groups = 4;
    product.rows = view(static_cast<const void*>(results), DType::bf16, {16, 256});
    product.out = view(static_cast<void*>(results + first), dtype, {16, 104});
    product.out.strides[0] = stride;
    return cuda_engine::sizes_of(product).same_sums;
  };
  EXPECT_TRUE(same(DType::bf16, 104, 0));
  EXPECT_TRUE(same(DType::bf16, 112, 8));
  EXPECT_FALSE(same(DType::bf16, 108, 0));
  EXPECT_FALSE(same(DType::bf16, 104, 1));
  EXPECT_FALSE(same(DType::f16, 104, 0));
  EXPECT_TRUE(same(DType::f32, 108, 2));  // exact in every kernel
}
#endif  // SHUNT_CUDA_BUILT

// Rows that begin at no multiple of 16 bytes, which no kernel of Hopper's copies: from one token to
// so many that aligned ones, too, would be gathered first.
TEST(BatchInvariant, NorDoTheyWhereRowsAreNotAligned) {
  const Context context = test::engine();
  const LayerSpec spec = small_layer({.experts = 4, .top_k = 2}, 512, 256);
  RandomLayer random(spec, 66);
  constexpr std::int64_t most = 900;
  for (const DType dtype : {DType::bf16, DType::f16}) {
    const Layer layer(spec, random.weights, context, {.dtype = dtype, .batch_invariant = true});
    const LayerSpec wide = small_layer({.experts = 4, .top_k = 2}, spec.hidden + 1, 256);
    RandomLayer of_rows(wide, 67);
    Tensor x = of_rows.hidden_states(most, dtype);
    x.shape[1] = spec.hidden;
    const auto rows_of = [&](std::int64_t from, std::int64_t upto) {
      return LayerInputs{.hidden = x.rows(from, upto)};
    };
    const Result all = run(context, layer, rows_of(0, most));
    for (const std::int64_t tokens : {1, 2, 17, 130, 500}) {
      SCOPED_TRACE(std::string(to_string(dtype)) + ", " + std::to_string(tokens));
      const Result some = run(context, layer, rows_of(most - tokens, most));
      EXPECT_TRUE(same(some.output, 0, all.output, most - tokens, tokens, spec.hidden));
    }
  }
}

TEST(BatchInvariant, ExplainSaysWhatItCosts) {
  const Context context = test::engine();
  const LayerSpec plain = small_layer({.experts = 4, .top_k = 1}, 1024, 512);
  LayerSpec with_shared = plain, with_latents = plain;
  with_shared.shared = {.intermediate = 512};
  with_latents.latent = with_latents.experts.hidden = 512;
  for (const LayerSpec& spec : {plain, with_shared, with_latents}) {
    RandomLayer random(spec, 65);
    const Layer usual(spec, random.weights, context);
    const Layer same(spec, random.weights, context, {.batch_invariant = true});
    EXPECT_EQ(usual.explain(1).find("batch-invariant"), std::string::npos);
    const std::string words = same.explain(1);
    EXPECT_NE(words.find("batch-invariant"), std::string::npos) << words;
    if (!test::on_hopper()) continue;
    const std::string before = "products about ";
    const std::size_t at = words.find(before);
    ASSERT_NE(at, std::string::npos) << words;
    EXPECT_GT(std::stod(words.substr(at + before.size())), 0) << words;
  }
}

}  // namespace
}  // namespace shunt
