// Cases of the grouped GEMM: equal groups, or groups as routing spreads rows.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "bench_cases.hpp"
#include "bench_tensors.hpp"
#include "core/convert.hpp"
#include "shunt/gemm.hpp"

namespace shunt::tool {

namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Products {
  Context context;
  GroupedGemmSpec spec;
  Variants rows, out, offsets;
  Tensor row_scales;  // of rows that are fp8
  Variants weights;   // of call 0, as they were before
  std::vector<Buffer> memory;
  std::vector<PreparedWeights> prepared;
  std::vector<std::int32_t> first_offsets;
  Buffer workspace;

  void run(std::int64_t i) const {
    grouped_gemm(context, spec,
                 {.rows = rows[i],
                  .offsets = offsets[i],
                  .prepared = prepared[at(i)],
                  .row_scales = row_scales},
                 out[i], workspace);
  }
};

// A few results against sums in double precision, of the first and the last rows of groups too.
void check_products(const Products& made, const std::string& label) {
  const GroupedGemmSpec& spec = made.spec;
  const std::int64_t count = made.first_offsets.back();
  if (count == 0) return;
  std::mt19937_64 random(1);
  const auto fetch = [&](const Tensor& tensor, std::int64_t row) {
    std::vector<char> bytes_of(at(bytes(tensor.dtype, tensor.shape[1])));
    made.context.copy(bytes_of.data(),
                      tensor.as<const char>() + bytes(tensor.dtype, row * tensor.strides[0]),
                      bytes_of.size());
    return bytes_of;
  };
  for (int sample = 0; sample < 64; ++sample) {
    const std::int64_t row = sample == 0   ? 0
                             : sample == 1 ? count - 1
                                           : static_cast<std::int64_t>(random() % at(count));
    const auto group = std::upper_bound(made.first_offsets.begin(), made.first_offsets.end(), row) -
                       made.first_offsets.begin() - 1;
    const std::vector<char> x = fetch(made.rows[0], row), y = fetch(made.out[0], row);
    for (int nth = 0; nth < 4; ++nth) {
      const std::int64_t column =
          nth == 0 ? spec.n - 1 : static_cast<std::int64_t>(random() % at(spec.n));
      const std::vector<char> w = fetch(made.weights[0], group * spec.n + column);
      double sum = 0, magnitude = 0;
      for (std::int64_t k = 0; k < spec.k; ++k) {
        const double term = static_cast<double>(load_f32(x.data(), spec.dtype, k)) *
                            static_cast<double>(load_f32(w.data(), spec.dtype, k));
        sum += term;
        magnitude += std::abs(term);
      }
      const double got = static_cast<double>(load_f32(y.data(), spec.dtype, column));
      const double most =
          0.004 * std::abs(sum) + 1e-7 * static_cast<double>(spec.k) * magnitude + 1e-6;
      if (!(std::abs(got - sum) <= most)) {
        differs(label, fmt::format("row {}, column {} is {}, not {}", row, column, got, sum));
      }
    }
  }
}

// Weights and rows that are fp8 already: one random matrix for all groups, rows of random bytes.
// What is multiplied is checked by the tests.
void make_packed(Products& made, std::int64_t rows, std::int64_t n) {
  const GroupedGemmSpec& spec = made.spec;
  const Context& context = made.context;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(at(spec.n * spec.k));
  for (float& x : numbers) x = normal(random) / std::sqrt(static_cast<float>(spec.k));
  const Buffer packed = host().allocate(packed_bytes(spec.format, spec.n, spec.k));
  const PackedMatrix matrix = pack(spec.format, view(numbers.data(), {spec.n, spec.k}), packed);
  const std::vector<PackedMatrix> all(at(spec.groups), matrix);
  for (std::int64_t i = 0; i < n; ++i) {
    made.memory.push_back(context.allocate(prepared_bytes(
        context, spec.dtype, spec.format, spec.groups, spec.n, spec.k, false, spec.rows)));
    made.prepared.push_back(
        prepare_packed(context, spec.dtype, all, made.memory.back(), spec.rows));
  }
  if (spec.rows == RowFormat::as_dtype) return;
  std::vector<std::uint8_t> bytes(at(rows * spec.k));
  for (auto& byte : bytes) byte = f32_to_e4m3(normal(random) * 100);
  made.rows = Variants(context, DType::f8_e4m3, {rows, spec.k}, n);
  for (std::int64_t i = 0; i < n; ++i) {
    context.copy(made.rows[i].data, bytes.data(), bytes.size());
  }
  const std::int64_t blocks = spec.rows == RowFormat::fp8_token ? 1 : (spec.k + 127) / 128;
  const std::vector<float> scales(at(rows * blocks), 0.01f);
  made.memory.push_back(context.allocate(scales.size() * sizeof(float)));
  context.copy(made.memory.back().data(), scales.data(), scales.size() * sizeof(float));
  made.row_scales = view(static_cast<const void*>(made.memory.back().data()), DType::f32,
                         {rows, blocks}, context.device());
  if (spec.rows == RowFormat::fp8_token) made.row_scales.rank = 1;
}

}  // namespace

StageCase gemm_case(const Context& context, const bench::StageShape& shape, Spread spread,
                    std::int64_t rotate_bytes) {
  const int groups = shape.route.experts;
  const std::int64_t rows = shape.tokens * shape.route.top_k;
  auto made = std::make_shared<Products>(Products{.context = context,
                                                  .spec = {
                                                      .groups = groups,
                                                      .n = shape.columns,
                                                      .k = shape.hidden,
                                                      .dtype = shape.dtype,
                                                      .format = shape.format,
                                                      .rows = shape.rows,
                                                  }});
  require(supports(made->spec, context.device()));

  std::vector<std::vector<std::int32_t>> offsets;
  if (shape.group_rows > 0) {
    offsets.emplace_back();
    for (int g = 0; g <= groups; ++g) {
      offsets.back().push_back(static_cast<std::int32_t>(g * shape.group_rows));
    }
  } else {
    offsets = Batches(shape.route, spread, shape.tokens).offsets;
  }
  made->first_offsets = offsets[0];
  std::int64_t hit = 0;
  for (int g = 0; g < groups; ++g) hit += offsets[0][at(g) + 1] > offsets[0][at(g)];
  const bool packed = shape.format != FormatSpec{};
  const double width = element_bytes(shape.dtype);
  const double weight = packed ? bits_per_weight(shape.format) / 8 : width;
  const double row = shape.rows == RowFormat::as_dtype ? width : 1;
  const double moved = weight * static_cast<double>(hit * shape.columns * shape.hidden) +
                       static_cast<double>(rows) * (width * static_cast<double>(shape.columns) +
                                                    row * static_cast<double>(shape.hidden));
  std::int64_t n = variants_for(
      moved + weight * static_cast<double>((groups - hit) * shape.columns * shape.hidden),
      rotate_bytes);
  made->rows = Variants(context, shape.dtype, {rows, shape.hidden}, n);
  made->out = Variants(context, shape.dtype, {rows, shape.columns}, n);
  made->offsets = Variants(context, DType::i32, {groups + 1}, n);
  fill(context, made->rows, 1, 1);
  if (packed) make_packed(*made, rows, n);
  for (std::int64_t i = packed ? -1 : n - 1; i >= 0; --i) {
    made->weights = Variants(context, shape.dtype, {groups * shape.columns, shape.hidden}, 1);
    fill(context, made->weights, 1 / std::sqrt(static_cast<float>(shape.hidden)),
         2 + static_cast<std::uint64_t>(i));
    std::vector<Tensor> matrices;
    for (int g = 0; g < groups; ++g) {
      matrices.push_back(made->weights[0].rows(g * shape.columns, (g + 1) * shape.columns));
    }
    made->memory.push_back(context.allocate(
        prepared_bytes(context, shape.dtype, groups, shape.columns, shape.hidden)));
    made->prepared.push_back(prepare(context, shape.dtype, matrices, made->memory.back()));
    context.synchronize();
  }
  if (!packed) std::reverse(made->prepared.begin(), made->prepared.end());
  upload(context, made->offsets, offsets);
  made->workspace = context.allocate(grouped_gemm_workspace_bytes(context, made->spec, rows));

  std::string label =
      shape.group_rows > 0
          ? fmt::format("G{} M{} N{} K{}", groups, shape.group_rows, shape.columns, shape.hidden)
          : fmt::format("T{} G{} R{} N{} K{}", shape.tokens, groups, rows, shape.columns,
                        shape.hidden);
  if (packed) label += " " + to_string(shape.format);
  return {.op = "grouped_gemm",
          .label = label,
          .dtype = shape.dtype,
          .variants = n,
          .cost = {moved, 2.0 * static_cast<double>(rows * shape.columns * shape.hidden)},
          .on_tensor_cores = shape.dtype != DType::f32,
          .call = [made](std::int64_t i) { made->run(i); },
          .check =
              [made, label, packed] {
                if (!packed) check_products(*made, label);
              }};
}

}  // namespace shunt::tool
