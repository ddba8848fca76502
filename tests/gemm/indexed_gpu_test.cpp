// The indexed GEMM of every format and of plain weights, on a GPU: of small matrices, and of the
// sizes of a model with many small experts.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "engine.hpp"
#include "format/drawn_packed.hpp"
#include "gemm/gemm_data.hpp"
#include "shunt/indexed_gemm.hpp"
#if SHUNT_CUDA_BUILT
#include "gemm/fragment_prepare.hpp"
#include "gemm/fragment_product.hpp"
#endif

namespace shunt {
namespace {

using test::Array;

// Plain ones and packed ones.
struct Kind {
  FormatSpec format{};
  DType dtype = DType::bf16;
};
std::vector<Kind> kinds() {
  std::vector<Kind> all = {{{}, DType::f32}, {{}, DType::bf16}, {{}, DType::f16}};
  std::vector<FormatSpec> formats = known_formats();
  for (const int group : {16, 128}) formats.push_back({Format::int4, group});
  for (const FormatSpec& format : formats) {
    for (const DType dtype : {DType::bf16, DType::f16}) all.push_back({format, dtype});
  }
  return all;
}

// Rows of the one matrix of which each of a product's is a part.
std::int64_t apart(const FormatSpec& format) {
  return format.format == Format::fp8_block ? 128 : 8;
}

struct Size {
  int experts;
  std::int64_t n, k;
};

// Experts' matrices, overlapping ones, prepared; and as numbers.
class Experts {
 public:
  Experts(const Context& context, const Kind& kind, const Size& size) : kind_(kind), size_(size) {
    const std::int64_t rows = size.n + (size.experts - 1) * apart(kind.format);
    const double usual = 1 / std::sqrt(static_cast<double>(size.k));
    spec = {.groups = size.experts,
            .n = size.n,
            .k = size.k,
            .dtype = kind.dtype,
            .format = resolved(kind.format)};
    memory_ = context.allocate(
        prepared_bytes(context, kind.dtype, spec.format, size.experts, size.n, size.k));
    if (kind.format == FormatSpec{}) {
      const std::vector<float> values = normal_values(rows * size.k, 3, static_cast<float>(usual));
      Array all(kind.dtype, {rows, size.k});
      for (std::int64_t i = 0; i < rows * size.k; ++i) {
        all.set(i, values[static_cast<std::size_t>(i)]);
        numbers_.push_back(all.get(i));
      }
      std::vector<Tensor> matrices;
      for (int e = 0; e < size.experts; ++e) {
        matrices.push_back(all.tensor.rows(first(e), first(e) + size.n));
      }
      prepared = prepare(context, kind.dtype, matrices, memory_);
      return;
    }
    const DrawnPacked all(kind.format, rows, size.k, 3, usual);
    numbers_ = all.decoded();
    std::vector<PackedMatrix> matrices;
    for (int e = 0; e < size.experts; ++e) {
      matrices.push_back(all.matrix().rows(first(e), first(e) + size.n));
    }
    prepared = prepare_packed(context, kind.dtype, matrices, memory_);
  }

  const float* row(int expert, std::int64_t n) const {
    return numbers_.data() + (first(expert) + n) * size_.k;
  }
  // By how much of itself a weight may be off: kernels for many rows round those of int4 and
  // dense3.
  double loss(const Context& context, std::int64_t pairs) const {
    const bool bf16 = kind_.dtype == DType::bf16, int4 = kind_.format.format == Format::int4;
    if (!int4 && kind_.format.format != Format::dense3) return 0;
    bool many = false;
#if SHUNT_CUDA_BUILT
    auto sizes = cuda_engine::sizes_of(cuda_engine::fragments_of(prepared), spec.groups, pairs);
    for (const bool in_place : {false, true}) {  // read as ids pick them, or gathered before
      sizes.rows_in_place = in_place;
      const auto plan = cuda_engine::plan_fragments(sizes, cuda_engine::figures(context.gpu()));
      many = many || plan.kernel == cuda_engine::PackedPlan::many_rows;
    }
#else
    (void)context, (void)pairs;
#endif
    if (!many) return 0;
    return int4 ? (bf16 ? 0x1.01p-7 : 0x1p-10) : bf16 ? 0x1p-8 : 0;
  }

  GroupedGemmSpec spec;
  PreparedWeights prepared;

 private:
  std::int64_t first(int expert) const { return expert * apart(kind_.format); }

  Kind kind_;
  Size size_;
  Buffer memory_;
  std::vector<float> numbers_;
};

// `tokens` rows with `slots` ids each, some of them nobody's; every `step`-th column is compared.
void check(const Context& context, const Experts& of, std::int64_t tokens, int slots, DType out_as,
           std::int64_t step) {
  SCOPED_TRACE(testing::Message() << tokens << " rows, " << slots << " ids each, out "
                                  << to_string(out_as));
  const std::int64_t n = of.spec.n, k = of.spec.k, pairs = tokens * slots;
  const Array x = test::random_array(of.spec.dtype, {tokens, k}, static_cast<unsigned>(tokens));
  const Array bias = test::random_array(DType::f32, {of.spec.groups, n}, 4);
  GroupedGemmSpec spec = of.spec;
  spec.bias = tokens % 2 == 0;
  std::mt19937 random(static_cast<unsigned>(tokens * slots));
  std::uniform_int_distribution<std::int32_t> any(-1, spec.groups);
  std::vector<std::int32_t> ids;
  for (std::int64_t pair = 0; pair < pairs; ++pair) ids.push_back(any(random));
  ids[0] = spec.groups - 1;
  Array out(out_as, {pairs, n});
  const Buffer workspace =
      context.allocate(indexed_gemm_workspace_bytes(context, spec, tokens, slots));
  test::Mirror mirror(context);
  IndexedGemmInputs in{.rows = mirror.in(x.tensor),
                       .ids = mirror.in(view(ids.data(), {tokens, slots})),
                       .prepared = of.prepared};
  if (spec.bias) in.bias = mirror.in(bias.tensor);
  const Tensor to = mirror.out(out.tensor);
  mirror.poison();
  indexed_gemm(context, spec, in, to, workspace);
  mirror.fetch();
  std::vector<double> rows;
  for (std::int64_t i = 0; i < tokens * k; ++i) rows.push_back(static_cast<double>(x.get(i)));
  const double loss = of.loss(context, pairs);
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    const double* const row = rows.data() + pair / slots * k;
    const std::int32_t id = ids[static_cast<std::size_t>(pair)];
    for (std::int64_t c = pair % step; c < n; c += step) {
      double want = 0, magnitude = 0;
      if (id >= 0 && id < spec.groups) {
        const float* const w = of.row(id, c);
        for (std::int64_t i = 0; i < k; ++i) {
          const double term = static_cast<double>(w[i]) * row[i];
          want += term;
          magnitude += std::abs(term);
        }
        if (spec.bias) want += static_cast<double>(bias.get(id * n + c));
      }
      // The last two as for PackedGemm: factors of rows, and the result's type.
      const double bound = test::sum_bound(k, magnitude) + loss * magnitude +
                           3e-7 * std::abs(want) + test::rounding(out_as) * std::abs(want) * 1.01;
      ASSERT_NEAR(static_cast<double>(out.get(pair * n + c)), want, bound)
          << "pair " << pair << ", expert " << id << ", column " << c;
    }
  }
}

TEST(IndexedGemmOnGpu, OfEveryFormatAndPlain) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  for (const Kind& kind : kinds()) {
    for (const Size& size : {Size{5, 70, 144}, Size{12, 136, 264}, Size{3, 1, 8}}) {
      SCOPED_TRACE(testing::Message() << to_string(kind.format) << ", " << to_string(kind.dtype)
                                      << " [" << size.n << ", " << size.k << "]");
      const Experts experts(context, kind, size);
      for (std::int64_t tokens = 1; tokens <= 8; ++tokens) {
        check(context, experts, tokens, 1 + static_cast<int>(tokens) % 3,
              tokens % 3 == 0 ? kind.dtype : DType::f32, 1);
        if (HasFatalFailure()) return;
      }
      check(context, experts, 150, 2, kind.dtype, 3);
      if (HasFatalFailure()) return;
    }
  }
}

// Qwen3-Next: gate and up [2 x 512, 2048], down [2048, 512], ten experts a token.
TEST(IndexedGemmOnGpu, OfSmallExpertsOfAModel) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  for (const Kind& kind : kinds()) {
    for (const Size& size : {Size{12, 1024, 2048}, Size{12, 2048, 512}}) {
      SCOPED_TRACE(testing::Message() << to_string(kind.format) << ", " << to_string(kind.dtype)
                                      << " [" << size.n << ", " << size.k << "]");
      const Experts experts(context, kind, size);
      for (std::int64_t tokens = 1; tokens <= 8; ++tokens) {
        check(context, experts, tokens, 10, kind.dtype, 61);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace shunt
