// Rows, results and matrices whose offsets are past 2^31 elements, plain and packed, in every walk:
// against double precision; on a GPU by every kernel and tile.
#include "far_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "format/plain.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/on_hopper.hpp"
#include "gemm/packed_data.hpp"
#include "shunt/indexed_gemm.hpp"
#if SHUNT_CUDA_BUILT
#include "gemm/fragment_prepare.hpp"
#include "gemm/packed_product.hpp"
#endif

namespace shunt::test {
namespace {

constexpr std::int64_t n = 136, k = 256;
constexpr int groups = 3;

// Few rows, as their kernels see them, and many; past 2^31 elements in all. Of rows and of results.
struct Far {
  std::vector<std::int32_t> sizes;
  std::int64_t stride;
  std::int64_t rows() const {
    std::int64_t all = 0;
    for (const std::int32_t size : sizes) all += size;
    return all;
  }
};
const Far distances[] = {{{2, 0, 3}, (std::int64_t{1} << 29) + 64},
                         {{299, 1, 220}, (std::int64_t{1} << 22) + 64}};

struct Kind {
  FormatSpec format{};
  DType dtype = DType::bf16, rows = DType::bf16, out = DType::bf16;
  RowFormat row_format = RowFormat::as_dtype;
  std::string text() const {
    return to_string(format) + ", " + to_string(dtype) + ", rows of " + to_string(rows) + ", out " +
           to_string(out);
  }
};
std::vector<Kind> kinds() {
  std::vector<Kind> all = {{.dtype = f32, .rows = f32, .out = bf16},
                           {.dtype = bf16, .rows = bf16, .out = f32},
                           {.dtype = f16, .rows = f16, .out = f16},
                           {.dtype = bf16, .rows = f16, .out = bf16},  // converted on the way
                           {.format = {Format::nvfp4}},
                           {.format = {Format::int4, 32}, .dtype = f16, .rows = f16, .out = f16},
                           {.format = {Format::fp8_block}, .out = f32}};
  if (on_hopper()) {
    for (const auto& [format, rows] : {std::pair{Format::fp8_block, RowFormat::fp8_block},
                                       {Format::fp8_channel, RowFormat::fp8_token}}) {
      all.push_back({.format = {format}, .rows = DType::f8_e4m3, .row_format = rows});
    }
  }
  return all;
}

// Rows, weights and what they give.
class Made {
 public:
  Made(const Context& context, const Kind& of, const Far& distance)
      : kind(of),
        rows(distance.rows()),
        x(kind.rows, {rows, k}),
        far_x(context, kind.rows, rows, k, distance.stride),
        far_out(context, kind.out, rows, n, distance.stride),
        mirror(context) {
    for (const std::int32_t size : distance.sizes) offsets.push_back(offsets.back() + size);
    const Array normal = random_array(f32, {rows, k}, 1);
    const bool fp8 = kind.rows == DType::f8_e4m3;
    for (std::int64_t i = 0; i < rows * k; ++i) x.set(i, (fp8 ? 40.0F : 1.0F) * normal.get(i));
    far_x.put(x.tensor.data);
    const std::int64_t blocks = kind.row_format == RowFormat::fp8_block ? 2 : 1;
    for (std::int64_t i = 0; i < rows * blocks; ++i) {
      scales.push_back(0.01F + 0.01F * static_cast<float>(i % 5));
    }
    if (fp8) {
      row_scales =
          mirror.in(blocks == 2 ? view(scales.data(), {rows, 2}) : view(scales.data(), {rows}));
    }
    std::vector<PackedMatrix> matrices;
    std::vector<Tensor> plain_matrices;
    for (int g = 0; g < groups; ++g) {
      const std::vector<float> values = normal_values(n * k, static_cast<unsigned>(g + 2), 0.1F);
      std::vector<double>& numbers = weights.emplace_back();
      if (kind.format == FormatSpec{}) {
        plain.emplace_back(kind.dtype, std::initializer_list<std::int64_t>{n, k});
        for (std::int64_t i = 0; i < n * k; ++i) {
          plain.back().set(i, values[static_cast<std::size_t>(i)]);
          numbers.push_back(static_cast<double>(plain.back().get(i)));
        }
        plain_matrices.push_back(plain.back().tensor);
        continue;
      }
      packed.push_back(Packed::of(kind.format, values, n, k));
      for (std::int64_t i = 0; i < n * k; ++i) {
        numbers.push_back(plain_weight(packed.back().packed, i / k, i % k));
      }
      matrices.push_back(packed.back().packed);
    }
    memory = context.allocate(
        prepared_bytes(context, kind.dtype, kind.format, groups, n, k, false, kind.row_format));
    prepared = kind.format == FormatSpec{}
                   ? prepare(context, kind.dtype, plain_matrices, memory)
                   : prepare_packed(context, kind.dtype, matrices, memory, kind.row_format);
    expect(blocks);
    clear();
  }

  GroupedGemmSpec spec() const {
    return {.groups = groups,
            .n = n,
            .k = k,
            .dtype = kind.dtype,
            .format = resolved(kind.format),
            .rows = kind.row_format};
  }
  Tensor offsets_there() { return mirror.in(view(offsets.data(), {groups + 1})); }
  // In the terms of any of a GPU's kernels.
  template <class Product>
  void put_into(Product& product) {
    product.groups = groups;
    product.prepared = prepared.data;
    product.offsets = offsets_there().as<const std::int32_t>();
    product.rows = far_x.tensor();
    product.out = far_out.tensor();
  }
  // What no product gives, into every row.
  void clear() {
    Array sevens(kind.out, {rows, n});
    for (std::int64_t i = 0; i < rows * n; ++i) sevens.set(i, 7777);
    far_out.put(sevens.tensor.data);
  }
  // `loss`: of each weight, where a kernel may round it.
  void check(double loss = 0) const {
    Array got(kind.out, {rows, n});
    far_out.get(got.tensor.data);
    for (std::int64_t i = 0; i < rows * n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_NEAR(static_cast<double>(got.get(i)), want[at], bound[at] + loss * magnitudes[at])
          << "row " << i / n << " column " << i % n;
    }
  }

  Kind kind;
  std::int64_t rows;
  std::vector<std::int32_t> offsets = {0};
  Array x;
  FarRows far_x, far_out;
  Mirror mirror;
  std::vector<float> scales;
  Tensor row_scales;
  std::vector<Array> plain;
  std::vector<Packed> packed;
  std::vector<std::vector<double>> weights;
  Buffer memory;
  PreparedWeights prepared;
  std::vector<double> want, bound, magnitudes;

 private:
  // As it is multiplied.
  double number(std::int64_t r, std::int64_t i, std::int64_t blocks) const {
    const float value = x.get(r * k + i);
    if (row_scales) {
      return static_cast<double>(value) *
             static_cast<double>(scales[static_cast<std::size_t>(r * blocks + i / (k / blocks))]);
    }
    char rounded[4];
    store_f32(rounded, kind.dtype, 0, value);
    return static_cast<double>(load_f32(rounded, kind.dtype, 0));
  }
  void expect(std::int64_t blocks) {
    for (std::size_t g = 0; g < weights.size(); ++g) {
      for (std::int64_t r = offsets[g]; r < offsets[g + 1]; ++r) {
        std::vector<double> row;
        double largest = 0;
        for (std::int64_t i = 0; i < k; ++i) {
          row.push_back(number(r, i, blocks));
          largest = std::max(largest, std::abs(row.back()));
        }
        for (std::int64_t c = 0; c < n; ++c) {
          double sum = 0, magnitude = 0, of_weights = 0, most = 0;
          for (std::int64_t i = 0; i < k; ++i) {
            const double weight = weights[g][static_cast<std::size_t>(c * k + i)];
            const double term = weight * row[static_cast<std::size_t>(i)];
            sum += term;
            magnitude += std::abs(term);
            of_weights += std::abs(weight);
            most = std::max({most, std::abs(term), std::abs(sum)});
          }
          want.push_back(sum);
          magnitudes.push_back(magnitude);
          // The CPU multiplies packed weights by rows as integers (docs/formats.md); tensor cores
          // lose some of e4m3, twice, for the second block begins anew.
          bound.push_back(sum_bound(k, magnitude) + 3e-7 * magnitude +
                          (kind.format == FormatSpec{} ? 0 : 0x1p-14 * largest * of_weights) +
                          (row_scales ? 4 * fp8_step_bound(most) : 0) +
                          rounding(kind.out) * std::abs(sum) * 1.01 + 1e-7);
        }
      }
    }
  }
};

// By offsets, and each group in a room of its own, whose counts say how many of its rows are there.
TEST(GroupedGemmFarRows, GiveWhatTheirNumbersGive) {
  const Context context = engine(2);
  for (const Kind& kind : kinds()) {
    for (const Far& distance : distances) {
      SCOPED_TRACE(kind.text() + ", " + std::to_string(distance.rows()) + " rows");
      Made made(context, kind, distance);
      const GroupedGemmSpec spec = made.spec();
      const Buffer workspace =
          context.allocate(grouped_gemm_workspace_bytes(context, spec, made.rows));
      GroupedGemmInputs in{.rows = made.far_x.tensor(),
                           .offsets = made.offsets_there(),
                           .prepared = made.prepared,
                           .row_scales = made.row_scales};
      grouped_gemm(context, spec, in, made.far_out.tensor(), workspace);
      // Kernels for many rows may round int4.
      made.check(kind.format.format == Format::int4 ? 0x1p-10 : 0);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

// Rooms for as many rows each, one behind the other; of the last all are there.
TEST(GroupedGemmFarRows, InRoomsOfTheirOwn) {
  const Context context = engine(2);
  const std::int64_t capacity = 150;
  for (const Kind& kind :
       {Kind{.dtype = bf16, .rows = bf16, .out = bf16}, Kind{.format = {Format::nvfp4}}}) {
    SCOPED_TRACE(kind.text());
    Made made(context, kind, {{150, 150, 150}, (std::int64_t{1} << 23) + 64});
    const GroupedGemmSpec spec = made.spec();
    const Buffer workspace =
        context.allocate(grouped_gemm_workspace_bytes(context, spec, made.rows));
    const auto rooms = [&](const Tensor& flat) {
      Tensor t = flat;
      t.rank = 3;
      t.shape = {groups, capacity, flat.shape[1]};
      t.strides = {capacity * flat.strides[0], flat.strides[0], 1};
      return t;
    };
    grouped_gemm(context, spec, {.rows = rooms(made.far_x.tensor()), .prepared = made.prepared},
                 rooms(made.far_out.tensor()), workspace);
    made.check();
    // Of the first group a few, of the second none: what they have no rows for stays.
    made.clear();
    const std::vector<std::int32_t> counts = {3, 0, 150};
    grouped_gemm(context, spec,
                 {.rows = rooms(made.far_x.tensor()),
                  .counts = made.mirror.in(view(counts.data(), {groups})),
                  .prepared = made.prepared},
                 rooms(made.far_out.tensor()), workspace);
    Array got(kind.out, {made.rows, n}), seven(kind.out, {1});
    seven.set(0, 7777);
    made.far_out.get(got.tensor.data);
    for (std::int64_t i = 0; i < made.rows * n; ++i) {
      const std::int64_t r = i / n;
      const auto at = static_cast<std::size_t>(i);
      if (r % capacity < counts[static_cast<std::size_t>(r / capacity)]) {
        ASSERT_NEAR(static_cast<double>(got.get(i)), made.want[at], made.bound[at]) << "row " << r;
      } else {
        ASSERT_EQ(got.get(i), seven.get(0)) << "row " << r << " is nobody's";
      }
    }
  }
}

// Matrices that are not prepared, of which the last begins past 2^31 elements.
TEST(GroupedGemmFarRows, OfMatricesFarApart) {
  const Context context = engine(2);
  const std::int64_t rows = 40;
  for (const DType dtype : {bf16, f32}) {
    SCOPED_TRACE(to_string(dtype));
    const Array x = random_array(dtype, {rows, k}, 1), w = random_array(dtype, {groups, n * k}, 2);
    FarRows far(context, dtype, groups, n * k, (std::int64_t{1} << 30) + 64);
    far.put(w.tensor.data);
    Tensor matrices = far.tensor();
    matrices.rank = 3;
    matrices.shape = {groups, n, k};
    matrices.strides = {far.tensor().strides[0], k, 1};
    const GroupedGemmSpec spec{.groups = groups, .n = n, .k = k, .dtype = dtype, .prepared = false};
    const std::vector<std::int32_t> offsets = {0, 2, 3, static_cast<std::int32_t>(rows)};
    Array out(f32, {rows, n});
    Mirror mirror(context);
    const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, spec, rows));
    grouped_gemm(context, spec,
                 {.rows = mirror.in(x.tensor),
                  .offsets = mirror.in(view(offsets.data(), {groups + 1})),
                  .weights = matrices},
                 mirror.out(out.tensor), workspace);
    mirror.fetch();
    for (std::int64_t i = 0; i < rows * n; ++i) {
      const std::int64_t r = i / n, g = r < 2 ? 0 : r < 3 ? 1 : 2;
      double sum = 0, magnitude = 0;
      for (std::int64_t j = 0; j < k; ++j) {
        const double term = static_cast<double>(w.get((g * n + i % n) * k + j)) *
                            static_cast<double>(x.get(r * k + j));
        sum += term;
        magnitude += std::abs(term);
      }
      ASSERT_NEAR(static_cast<double>(out.get(i)), sum, sum_bound(k, magnitude))
          << "row " << r << " column " << i % n;
    }
  }
}

// Of the indexed GEMM rows lie far apart, and twice as many results.
TEST(GroupedGemmFarRows, OfTheIndexedGemm) {
  const Context context = engine(2);
  const Kind kind{.dtype = bf16, .rows = bf16, .out = bf16};
  Made made(context, kind, distances[0]);
  const GroupedGemmSpec spec = made.spec();
  const std::int64_t tokens = made.rows;
  std::vector<std::int32_t> ids;
  for (int g = 0; g < groups; ++g) {
    for (std::int32_t r = made.offsets[static_cast<std::size_t>(g)];
         r < made.offsets[static_cast<std::size_t>(g) + 1]; ++r) {
      ids.push_back(-1);
      ids.push_back(g);
    }
  }
  FarRows out(context, bf16, 2 * tokens, n, (std::int64_t{1} << 28) + 64);
  const Buffer workspace = context.allocate(indexed_gemm_workspace_bytes(context, spec, tokens, 2));
  indexed_gemm(context, spec,
               {.rows = made.far_x.tensor(),
                .ids = made.mirror.in(view(ids.data(), {tokens, 2})),
                .prepared = made.prepared},
               out.tensor(), workspace);
  Array got(bf16, {2 * tokens, n});
  out.get(got.tensor.data);
  for (std::int64_t i = 0; i < 2 * tokens * n; ++i) {
    const std::int64_t pair = i / n;
    const auto at = static_cast<std::size_t>(pair / 2 * n + i % n);
    if (pair % 2 == 0) {
      ASSERT_EQ(got.get(i), 0) << "pair " << pair;
    } else {
      ASSERT_NEAR(static_cast<double>(got.get(i)), made.want[at], made.bound[at])
          << "pair " << pair << " column " << i % n;
    }
  }
}

#if SHUNT_CUDA_BUILT
// Every plan that there is for them, and every tile.
TEST(GroupedGemmFarRows, ByEveryPlanOfAGpu) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  const auto figures = cuda_engine::figures(context.gpu());
  // `multiply`: by a plan. No tensor map need begin as far before the results as 64 of the few
  // rows.
  const auto run = [&](Made& made, const std::string& words, const auto& multiply) {
    SCOPED_TRACE(words);
    made.clear();
    if (multiply()) return made.check();
    EXPECT_LT(made.rows, 10) << "not multiplied";
  };
  for (const Far& distance : distances) {
    {
      Made made(context, {}, distance);
      cuda_engine::GroupedProduct product;
      product.layout = {DType::bf16, n, k, false};
      made.put_into(product);
      const auto sizes = cuda_engine::sizes_of(product);
      const auto plans = {cuda_engine::candidates(sizes, figures),
                          cuda_engine::portable_candidates(sizes, figures)};
      for (const auto& some : plans) {
        for (const cuda_engine::ProductPlan& plan : some) {
          if (plan.kernel == cuda_engine::ProductPlan::portable && plan.blocks == 0) continue;
          run(made, describe(plan),
              [&] { return cuda_engine::multiply_as_planned(context.gpu(), plan, product); });
          if (HasFatalFailure()) return;
        }
      }
    }
    for (const FormatSpec& format : {FormatSpec{Format::nvfp4}, FormatSpec{Format::int8}}) {
      Made made(context, {.format = format}, distance);
      cuda_engine::FragmentProduct product;
      product.layout = cuda_engine::fragments_of(made.prepared);
      made.put_into(product);
      for (const cuda_engine::PackedPlan& plan :
           every_fragment_plan(cuda_engine::sizes_of(product), figures)) {
        run(made, to_string(format) + ", " + cuda_engine::fragment_words(plan),
            [&] { return cuda_engine::multiply_as_planned(context.gpu(), plan, product); });
        if (HasFatalFailure()) return;
      }
    }
    if (!on_hopper()) continue;
    Made made(
        context,
        {.format = {Format::fp8_block}, .rows = DType::f8_e4m3, .row_format = RowFormat::fp8_block},
        distance);
    cuda_engine::PackedProduct product;
    product.layout = {Format::fp8_block, n, k, false};
    made.put_into(product);
    product.row_scales = made.row_scales;
    for (const cuda_engine::PackedPlan& plan :
         cuda_engine::candidates(cuda_engine::sizes_of(product), figures)) {
      run(made, describe(plan),
          [&] { return cuda_engine::multiply_as_planned(context.gpu(), plan, product); });
      if (HasFatalFailure()) return;
    }
  }
}
#endif

}  // namespace
}  // namespace shunt::test
