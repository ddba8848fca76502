// Cases of the indexed GEMM.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "bench_cases.hpp"
#include "bench_indexed.hpp"
#include "bench_packed.hpp"
#include "core/convert.hpp"
#include "shunt/indexed_gemm.hpp"

namespace shunt::tool {

namespace {

// Different matrices: a wrong id shows, and making one for each group would take longer than the
// rest.
constexpr int different = 3;

struct Indexed {
  Context context;
  std::shared_ptr<const IndexedMatrices> matrices;
  Variants rows, ids, out;
  Buffer workspace;

  IndexedCall tensors(std::int64_t i) const { return {rows[i], ids[i], out[i]}; }
  void run(std::int64_t i) const {
    const IndexedCall call = tensors(i);
    indexed_gemm(context, matrices->spec(),
                 {.rows = call.rows, .ids = call.ids, .prepared = (*matrices)[i]}, call.out,
                 workspace);
  }
};

// A row of a matrix, on the host.
std::vector<float> fetched(const Context& context, const Tensor& matrix, std::int64_t row) {
  std::vector<char> raw(at(bytes(matrix.dtype, matrix.shape[1])));
  context.copy(raw.data(), matrix.as<const char>() + bytes(matrix.dtype, row * matrix.strides[0]),
               raw.size());
  std::vector<float> values(at(matrix.shape[1]));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_f32(raw.data(), matrix.dtype, static_cast<std::int64_t>(i));
  }
  return values;
}

}  // namespace

IndexedMatrices::IndexedMatrices(const Context& context, const GroupedGemmSpec& spec,
                                 std::int64_t copies)
    : spec_(spec) {
  if (spec.format != FormatSpec{}) {
    pack_all(context, copies);
  } else {
    prepare_all(context, copies);
  }
}

void IndexedMatrices::pack_all(const Context& context, std::int64_t copies) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<BenchMatrix> packed;
  packed.reserve(different);
  for (int i = 0; i < std::min(different, spec_.groups); ++i) {
    std::vector<float> numbers(at(spec_.n * spec_.k));
    for (float& x : numbers) x = normal(random) / std::sqrt(static_cast<float>(spec_.k));
    const Tensor plain = view(numbers.data(), {spec_.n, spec_.k});
    packed.emplace_back(host(), spec_.format, plain);
    unpack(packed.back().matrix(), plain);
    unpacked_.push_back(std::move(numbers));
  }
  std::vector<PackedMatrix> all;
  for (int g = 0; g < spec_.groups; ++g) all.push_back(packed[at(g) % packed.size()].matrix());
  prepare_copies(context, spec_.dtype, all, RowFormat::as_dtype, copies, memory_, prepared_);
}

void IndexedMatrices::prepare_all(const Context& context, std::int64_t copies) {
  const bool gpu = context.device().type == DeviceType::cuda;
  if (gpu) {
    on_gpu_ = Variants(context, spec_.dtype, {spec_.groups * spec_.n, spec_.k}, 1);
  } else {
    const std::int64_t elements = (spec_.n * spec_.k + 63) / 64 * 64;
    on_cpu_ = std::make_shared<RandomPool>(context, bf16, different * elements);
  }
  // Copy 0 is the last that is made, and stays.
  for (std::int64_t i = copies - 1; i >= 0; --i) {
    if (gpu) {
      fill(context, on_gpu_, 1 / std::sqrt(static_cast<float>(spec_.k)),
           2 + static_cast<std::uint64_t>(i));
    }
    plain_.clear();
    for (int g = 0; g < spec_.groups; ++g) {
      plain_.push_back(gpu ? on_gpu_[0].rows(g * spec_.n, (g + 1) * spec_.n)
                           : on_cpu_->take(spec_.n, spec_.k));
    }
    memory_.push_back(
        context.allocate(prepared_bytes(context, spec_.dtype, spec_.groups, spec_.n, spec_.k)));
    prepared_.push_back(prepare(context, spec_.dtype, plain_, memory_.back()));
    context.synchronize();
  }
  std::reverse(prepared_.begin(), prepared_.end());
}

std::vector<float> IndexedMatrices::row(const Context& context, std::int64_t group,
                                        std::int64_t n) const {
  if (unpacked_.empty()) return fetched(context, plain_[at(group)], n);
  const float* const from = unpacked_[at(group) % unpacked_.size()].data() + n * spec_.k;
  return {from, from + spec_.k};
}

GroupedGemmSpec indexed_spec(const bench::StageShape& shape) {
  return {.groups = shape.route.experts,
          .n = shape.columns,
          .k = shape.hidden,
          .dtype = shape.dtype,
          .format = shape.format};
}

IndexedSize indexed_size(const bench::StageShape& shape) {
  const int slots = shape.route.top_k;
  return shape.row_a_pair ? IndexedSize{shape.tokens * slots, 1} : IndexedSize{shape.tokens, slots};
}

Cost indexed_cost(const bench::StageShape& shape, std::int64_t hit, std::int64_t used) {
  const double width = element_bytes(shape.dtype);
  const double weight = shape.format == FormatSpec{} ? width : bits_per_weight(shape.format) / 8;
  const IndexedSize size = indexed_size(shape);
  return {weight * static_cast<double>(hit * shape.columns * shape.hidden) +
              width * static_cast<double>(size.rows * shape.hidden + size.pairs() * shape.columns) +
              4 * static_cast<double>(size.pairs()),
          2 * static_cast<double>(used * shape.columns * shape.hidden)};
}

std::string indexed_label(const bench::StageShape& shape, const std::string& tokens) {
  return fmt::format("{} G{} R{} N{} K{}", tokens, shape.route.experts, indexed_size(shape).pairs(),
                     shape.columns, shape.hidden);
}

// The limit is that of the grouped GEMM's check: products round packed weights, or rows, to 16 bits
// in some kernels, each by chance alone.
void check_indexed(const std::string& label, const Context& context,
                   const IndexedMatrices& matrices, const IndexedCall& call) {
  const GroupedGemmSpec& spec = matrices.spec();
  const OnHost ids(context, call.ids);
  const std::int64_t pairs = ids.tensor.elements(), slots = ids.tensor.shape[1];
  if (pairs == 0 || spec.n == 0) return;
  const bool packed = spec.format != FormatSpec{};
  std::mt19937_64 random(1);
  for (std::int64_t sample = 0; sample < std::min<std::int64_t>(pairs, 64); ++sample) {
    const std::int64_t pair = pairs <= 64    ? sample
                              : sample == 0  ? 0
                              : sample == 63 ? pairs - 1
                                             : static_cast<std::int64_t>(random() % at(pairs));
    const std::int32_t id = ids.ints()[pair];
    const std::vector<float> x = fetched(context, call.rows, pair / slots),
                             y = fetched(context, call.out, pair);
    for (int nth = 0; nth < 4; ++nth) {
      const std::int64_t column =
          nth == 0 ? spec.n - 1 : static_cast<std::int64_t>(random() % at(spec.n));
      double sum = 0, magnitude = 0, squares = 0;
      if (id >= 0 && id < spec.groups) {
        const std::vector<float> w = matrices.row(context, id, column);
        for (std::size_t k = 0; k < w.size(); ++k) {
          const double term = static_cast<double>(x[k]) * static_cast<double>(w[k]);
          sum += term;
          magnitude += std::abs(term);
          squares += term * term;
        }
      }
      const auto got = static_cast<double>(y[at(column)]);
      const double most = 0.004 * std::abs(sum) + 1e-7 * static_cast<double>(spec.k) * magnitude +
                          1e-6 + (packed ? 0.03 * std::sqrt(squares) : 0);
      if (!(std::abs(got - sum) <= most)) {
        differs(label, fmt::format("pair {}, column {} is {}, not {}", pair, column, got, sum));
      }
    }
  }
}

StageCase indexed_case(const Context& context, const bench::StageShape& shape, Spread spread,
                       std::int64_t rotate_bytes) {
  const GroupedGemmSpec spec = indexed_spec(shape);
  require(supports_indexed(spec, context.device()));
  const IndexedSize size = indexed_size(shape);
  const Batches batches(shape.route, spread, shape.tokens);
  const std::int64_t hit = distinct_experts(batches.ids[0], spec.groups);
  const Cost cost = indexed_cost(shape, hit, size.pairs());
  const Cost all = indexed_cost(shape, spec.groups, size.pairs());
  const std::int64_t n = variants_for(all.bytes, rotate_bytes);
  auto made = std::make_shared<Indexed>(Indexed{.context = context});
  made->matrices = std::make_shared<const IndexedMatrices>(context, spec, n);
  made->rows = Variants(context, shape.dtype, {size.rows, spec.k}, n);
  made->out = Variants(context, shape.dtype, {size.pairs(), spec.n}, n);
  made->ids = Variants(context, DType::i32, {size.rows, size.slots}, n);
  fill(context, made->rows, 1, 1);
  upload(context, made->ids, batches.ids);
  made->workspace =
      context.allocate(indexed_gemm_workspace_bytes(context, spec, size.rows, size.slots));
  std::string label = indexed_label(shape, fmt::format("T{}", shape.tokens));
  if (spec.format != FormatSpec{}) label += " " + to_string(spec.format);
  return {
      .op = "indexed_gemm",
      .label = label,
      .dtype = shape.dtype,
      .variants = n,
      .cost = cost,
      .on_tensor_cores = shape.dtype != DType::f32,
      .call = [made](std::int64_t i) { made->run(i); },
      .check = [made,
                label] { check_indexed(label, made->context, *made->matrices, made->tensors(0)); }};
}

}  // namespace shunt::tool
