// Cases of the grouped GEMM: equal groups, or groups as routing spreads rows.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>

#include "bench_cases.hpp"
#include "bench_packed.hpp"
#include "bench_tensors.hpp"
#include "core/convert.hpp"
#include "shunt/gemm.hpp"

namespace shunt::tool {

namespace {

struct Products {
  Context context;
  GroupedGemmSpec spec;
  bench::Walk walk = bench::Walk::offsets;
  std::int64_t capacity = 0;    // rows of a group, unless by offsets
  Variants rows, out;           // [R, ..]
  Variants offsets;             // counts, where they are masked
  std::int64_t expected = 0;    // rows of a group
  Tensor row_scales;            // of rows that are fp8
  Variants weights;             // of call 0, as they were before; or, packed,
  std::vector<float> unpacked;  // [N, K], of every group
  std::vector<Buffer> memory;
  std::vector<PreparedWeights> prepared;
  std::vector<std::int32_t> first_offsets;
  Buffer workspace;

  // [R, ..] as [groups, capacity, ..] where it is so.
  Tensor in_groups(Tensor t) const {
    if (walk == bench::Walk::offsets || !t) return t;
    for (int d = t.rank; d > 0; --d) {
      t.shape[at(d)] = t.shape[at(d - 1)];
      t.strides[at(d)] = t.strides[at(d - 1)];
    }
    ++t.rank;
    t.shape[0] = spec.groups, t.shape[1] = capacity;
    t.strides[0] = capacity * t.strides[1];
    return t;
  }
  // Of row number `row` of all that are there.
  std::int64_t place(std::int64_t row, std::int64_t group) const {
    if (walk == bench::Walk::offsets) return row;
    return group * capacity + row - first_offsets[at(group)];
  }
  void run(std::int64_t i) const {
    GroupedGemmInputs in{.rows = in_groups(rows[i]),
                         .expected_rows = expected,
                         .prepared = prepared[at(i)],
                         .row_scales = in_groups(row_scales)};
    if (walk == bench::Walk::offsets) in.offsets = offsets[i];
    if (walk == bench::Walk::masked) in.counts = offsets[i];
    grouped_gemm(context, spec, in, in_groups(out[i]), workspace);
  }
};

// Of every row that is fp8 already.
constexpr float row_scale = 0.01F;

// A few results against sums in double precision, of the first and the last rows of groups too.
// Packed weights: kernels for many rows round some formats' to 16 bits, tensor cores lose bits of
// sums of fp8, each by chance alone; three hundredths of a sum's deviation are more than either.
void check_products(const Products& made, const std::string& label) {
  const GroupedGemmSpec& spec = made.spec;
  const std::int64_t count = made.first_offsets.back();
  if (count == 0 || spec.rows == RowFormat::nvfp4) return;  // rows rounded by the product itself
  const bool packed = !made.unpacked.empty();
  const double scale = made.row_scales ? double{row_scale} : 1;
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
    const std::int64_t place = made.place(row, group);
    const std::vector<char> x = fetch(made.rows[0], place), y = fetch(made.out[0], place);
    for (int nth = 0; nth < 4; ++nth) {
      const std::int64_t column =
          nth == 0 ? spec.n - 1 : static_cast<std::int64_t>(random() % at(spec.n));
      std::vector<char> w;
      if (!packed) w = fetch(made.weights[0], group * spec.n + column);
      double sum = 0, magnitude = 0, squares = 0;
      for (std::int64_t k = 0; k < spec.k; ++k) {
        const float weight =
            packed ? made.unpacked[at(column * spec.k + k)] : load_f32(w.data(), spec.dtype, k);
        const double term = scale * static_cast<double>(load_f32(x.data(), made.rows[0].dtype, k)) *
                            static_cast<double>(weight);
        sum += term;
        magnitude += std::abs(term);
        squares += term * term;
      }
      const double got = static_cast<double>(load_f32(y.data(), spec.dtype, column));
      const double most = 0.004 * std::abs(sum) + 1e-7 * static_cast<double>(spec.k) * magnitude +
                          1e-6 + (packed ? 0.03 * std::sqrt(squares) : 0);
      if (!(std::abs(got - sum) <= most)) {
        differs(label, fmt::format("row {}, column {} is {}, not {}", row, column, got, sum));
      }
    }
  }
}

// Weights and rows that are fp8 already: one random matrix for all groups, rows of random bytes.
void make_packed(Products& made, std::int64_t rows, std::int64_t n) {
  const GroupedGemmSpec& spec = made.spec;
  const Context& context = made.context;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(at(spec.n * spec.k));
  for (float& x : numbers) x = normal(random) / std::sqrt(static_cast<float>(spec.k));
  const BenchMatrix packed(host(), spec.format, view(numbers.data(), {spec.n, spec.k}));
  made.unpacked.resize(numbers.size());
  unpack(packed.matrix(), view(made.unpacked.data(), {spec.n, spec.k}));
  const std::vector<PackedMatrix> all(at(spec.groups), packed.matrix());
  prepare_copies(context, spec.dtype, all, spec.rows, n, made.memory, made.prepared);
  if (spec.rows == RowFormat::as_dtype || spec.rows == RowFormat::nvfp4) return;
  // Each row begins elsewhere among a million that are drawn: drawing all takes longer than the
  // rest.
  constexpr std::int64_t drawn = 1 << 20, further = 7919;
  std::vector<std::uint8_t> some(at(drawn + spec.k)), bytes(at(rows * spec.k));
  for (auto& byte : some) byte = to_e4m3(normal(random) * 100);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::copy_n(some.begin() + row * further % drawn, spec.k, bytes.begin() + row * spec.k);
  }
  made.rows = Variants(context, DType::f8_e4m3, {rows, spec.k}, n);
  for (std::int64_t i = 0; i < n; ++i) {
    context.copy(made.rows[i].data, bytes.data(), bytes.size());
  }
  const std::int64_t blocks = spec.rows == RowFormat::fp8_token ? 1 : (spec.k + 127) / 128;
  const std::vector<float> scales(at(rows * blocks), row_scale);
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
                                                      .fast_accumulation = shape.fast_accumulation,
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
  // What lies on the device beside rows, and how many rows there is room for.
  std::int64_t room = rows;
  std::vector<std::vector<std::int32_t>> sizes = offsets;
  if (shape.walk != bench::Walk::offsets) {
    std::int32_t most = 0, least = std::numeric_limits<std::int32_t>::max();
    for (std::size_t draw = 0; draw < offsets.size(); ++draw) {
      sizes[draw].clear();
      for (int g = 0; g < groups; ++g) {
        sizes[draw].push_back(offsets[draw][at(g) + 1] - offsets[draw][at(g)]);
        most = std::max(most, sizes[draw].back());
        least = std::min(least, sizes[draw].back());
      }
    }
    if (shape.walk == bench::Walk::dense && most != least) {
      throw Error(Status::unsupported,
                  fmt::format("--walk dense: groups have {} to {} rows: must be of equal size, as "
                              "those of --grid are",
                              least, most));
    }
    made->walk = shape.walk;
    made->capacity = (shape.walk == bench::Walk::masked ? 2 : 1) * std::int64_t{most};
    made->expected = (rows + groups - 1) / groups;
    room = groups * made->capacity;
  }
  std::int64_t hit = 0;
  for (int g = 0; g < groups; ++g) hit += offsets[0][at(g) + 1] > offsets[0][at(g)];
  const bool packed = shape.format != FormatSpec{};
  const double width = element_bytes(shape.dtype);
  const double weight = packed ? bits_per_weight(shape.format) / 8 : width;
  const bool rounded = shape.rows == RowFormat::fp8_block || shape.rows == RowFormat::fp8_token;
  const double row = rounded ? 1 : width;
  const double moved = weight * static_cast<double>(hit * shape.columns * shape.hidden) +
                       static_cast<double>(rows) * (width * static_cast<double>(shape.columns) +
                                                    row * static_cast<double>(shape.hidden));
  std::int64_t n = variants_for(
      moved + weight * static_cast<double>((groups - hit) * shape.columns * shape.hidden),
      rotate_bytes);
  made->rows = Variants(context, shape.dtype, {room, shape.hidden}, n);
  made->out = Variants(context, shape.dtype, {room, shape.columns}, n);
  made->offsets = Variants(context, DType::i32, {static_cast<std::int64_t>(sizes[0].size())}, n);
  fill(context, made->rows, 1, 1);
  if (packed) make_packed(*made, room, n);
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
  upload(context, made->offsets, sizes);
  made->workspace = context.allocate(grouped_gemm_workspace_bytes(context, made->spec, room));

  std::string label =
      shape.group_rows > 0
          ? fmt::format("G{} M{} N{} K{}", groups, shape.group_rows, shape.columns, shape.hidden)
          : fmt::format("T{} G{} R{} N{} K{}", shape.tokens, groups, rows, shape.columns,
                        shape.hidden);
  if (packed) label += " " + to_string(shape.format);
  if (shape.fast_accumulation) label += " fast";
  if (shape.walk == bench::Walk::masked) label += " masked";
  if (shape.walk == bench::Walk::dense) label += " dense";
  return {.op = "grouped_gemm",
          .label = label,
          .dtype = shape.dtype,
          .variants = n,
          .cost = {moved, 2.0 * static_cast<double>(rows * shape.columns * shape.hidden)},
          .on_tensor_cores = shape.dtype != DType::f32,
          .fp8_rows = shape.rows != RowFormat::as_dtype,
          .call = [made](std::int64_t i) { made->run(i); },
          .check = [made, label] { check_products(*made, label); }};
}

}  // namespace shunt::tool
