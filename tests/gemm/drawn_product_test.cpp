// Grouped GEMMs whose every property is drawn at random: what supports() accepts is right against
// double precision, leaves what is not its own alone, and gives the same bits again.
//
// SHUNT_DRAWN=first:count takes other seeds than the few of every run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "drawn.hpp"
#include "engine.hpp"
#include "format/plain.hpp"
#include "gemm/packed_data.hpp"
#include "shunt/gemm.hpp"

namespace shunt {
namespace {

enum class Walk { ragged, masked, dense };

struct DrawnProduct {
  GroupedGemmSpec spec;
  Walk walk = Walk::ragged;
  std::vector<std::int32_t> counts;  // of every group
  std::int64_t capacity = 0;         // not ragged: rows that a group has room for
  std::int64_t behind = 0;           // ragged: rows behind the last group's
  std::int64_t expected = 0;
  DType rows_dtype = DType::f32, out_dtype = DType::f32, bias_dtype = DType::f32;
  bool rows_rounded = false;  // they are fp8, with scales
  bool transposed = false;    // matrices that are not prepared
  std::int64_t gap = 0;       // numbers between rows
  int threads = 1;

  explicit DrawnProduct(unsigned seed) {
    test::Draw draw(seed);
    spec.groups =
        static_cast<int>(draw.any({draw.between(1, 4), draw.between(1, 40), draw.between(1, 150)}));
    const std::int64_t most = std::clamp<std::int64_t>(1500 / spec.groups, 24, 800);
    spec.n = draw.width(most);
    spec.k = draw.width(most);
    spec.dtype = draw.any({DType::f32, DType::bf16, DType::bf16, DType::f16});
    spec.bias = draw.one_in(3);
    spec.batch_invariant = draw.one_in(5);
    if (draw.one_in(2)) {
      spec.format = draw.format(spec.groups * spec.n * spec.k);
      if (spec.dtype == DType::f32 && !draw.one_in(4)) spec.dtype = DType::bf16;
      if (draw.one_in(4)) {  // a GPU's
        spec.rows = draw.any({RowFormat::fp8_block, RowFormat::fp8_token});
        spec.format = spec.rows == RowFormat::fp8_block
                          ? FormatSpec{Format::fp8_block}
                          : FormatSpec{draw.any({Format::fp8_channel, Format::fp8_tensor})};
        rows_rounded = spec.rows == RowFormat::fp8_token || draw.one_in(2);
      }
    } else {
      spec.prepared = !draw.one_in(3);
      transposed = draw.one_in(3);
    }
    walk = draw.any({Walk::ragged, Walk::ragged, Walk::masked, Walk::dense});
    capacity = draw.any({draw.between(1, 8), draw.between(1, 70), draw.between(1, 300)});
    capacity = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(4e7 / static_cast<double>(spec.groups * spec.n * spec.k)), 1,
        capacity);
    const bool skewed = draw.one_in(3);
    for (int g = 0; g < spec.groups; ++g) {
      const std::int64_t room = skewed && g % 5 != 0 ? 1 : capacity;
      counts.push_back(
          static_cast<std::int32_t>(walk == Walk::dense ? capacity : draw.between(0, room)));
    }
    if (draw.one_in(4)) behind = draw.between(1, 40);
    if (draw.one_in(3)) expected = draw.between(1, 200);
    rows_dtype = draw.one_in(2) ? spec.dtype : draw.dtype();
    if (rows_rounded) rows_dtype = DType::f8_e4m3;
    out_dtype = draw.one_in(2) ? spec.dtype : draw.dtype();
    bias_dtype = draw.dtype();
    if (draw.one_in(4)) gap = draw.any<std::int64_t>({1, 3, 8, 16});
    threads = static_cast<int>(draw.between(1, 3));
  }

  std::string text() const {
    const char* const walks[] = {"ragged", "masked", "dense"};
    std::string s = std::to_string(spec.groups) + " x [" + std::to_string(spec.n) + ", " +
                    std::to_string(spec.k) + "] " + to_string(spec.dtype) + ", " +
                    to_string(spec.format) + ", rows " + to_string(spec.rows) + " of " +
                    to_string(rows_dtype) + ", out " + to_string(out_dtype) + ", " +
                    walks[static_cast<int>(walk)] + ", room for " + std::to_string(capacity) +
                    ", expected " + std::to_string(expected) + ", gap " + std::to_string(gap) +
                    ", behind " + std::to_string(behind) + (spec.bias ? ", bias" : "") +
                    (spec.prepared ? ""
                     : transposed  ? ", not prepared, transposed"
                                   : ", not prepared") +
                    (spec.batch_invariant ? ", batch-invariant" : "") + ", rows of groups";
    for (const auto count : counts) s += " " + std::to_string(count);
    return s;
  }
};

class Product {
 public:
  Product(const DrawnProduct& drawn, unsigned seed) : d(drawn), random_(seed) {
    const GroupedGemmSpec& spec = d.spec;
    std::int64_t first = 0;
    for (const std::int32_t count : d.counts) {
      firsts_.push_back(first);
      offsets_.push_back(static_cast<std::int32_t>(first));
      first += d.walk == Walk::ragged ? count : d.capacity;
    }
    offsets_.push_back(static_cast<std::int32_t>(first));
    rows_ = d.walk == Walk::ragged ? first + d.behind : first;
    mine_.assign(static_cast<std::size_t>(rows_), -1);
    for (int g = 0; g < spec.groups; ++g) {
      for (std::int64_t r = 0; r < d.counts[static_cast<std::size_t>(g)]; ++r)
        mine_[static_cast<std::size_t>(firsts_[static_cast<std::size_t>(g)] + r)] = g;
    }
    make_matrices();
    make_rows();
    if (spec.bias) bias_ = filled(d.bias_dtype, spec.groups, spec.n, spec.n, 0.5F);
    out_ = filled(d.out_dtype, rows_, spec.n, spec.n + d.gap, 1);
  }

  // Every byte of the output's memory.
  std::vector<char> run(const Context& context) {
    const GroupedGemmSpec& spec = d.spec;
    if (initial_.empty()) initial_ = memory_.back();
    const std::vector<char> before = memory_.back() = initial_;
    Buffer held;
    test::Mirror mirror(context);
    GroupedGemmInputs in{.rows = mirror.in(shaped(x_, spec.k)), .expected_rows = d.expected};
    if (d.walk == Walk::ragged) in.offsets = mirror.in(view(offsets_.data(), {spec.groups + 1}));
    if (d.walk == Walk::masked) in.counts = mirror.in(view(d.counts.data(), {spec.groups}));
    if (spec.bias) in.bias = mirror.in(bias_);
    if (d.rows_rounded) {
      in.row_scales = mirror.in(
          spec.rows == RowFormat::fp8_token ? per_row() : shaped(scales_, scales_.shape[1]));
    }
    if (!spec.prepared) {
      in.weights = mirror.in(weights_);
    } else if (spec.format == FormatSpec{}) {
      std::vector<Tensor> each;
      for (int g = 0; g < spec.groups; ++g) each.push_back(weights_[g]);
      held = context.allocate(prepared_bytes(context, spec.dtype, spec.groups, spec.n, spec.k));
      in.prepared = prepare(context, spec.dtype, each, held);
    } else {
      held = context.allocate(prepared_bytes(context, spec.dtype, spec.format, spec.groups, spec.n,
                                             spec.k, false, spec.rows));
      in.prepared = prepare_packed(context, spec.dtype, packed_, held, spec.rows);
    }
    const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, spec, rows_));
    const std::vector<unsigned char> garbage(workspace.bytes(), 0xff);
    context.copy(workspace.data(), garbage.data(), garbage.size());
    grouped_gemm(context, spec, in, mirror.out(shaped(out_, spec.n)), workspace);
    mirror.fetch();
    std::vector<char> after = memory_.back();
    untouched_ = before;
    return after;
  }

  void expect_right() const {
    const GroupedGemmSpec& spec = d.spec;
    const std::int64_t size = bits(d.out_dtype) / 8, stride = (spec.n + d.gap) * size;
    for (std::int64_t r = 0; r < rows_; ++r) {
      const int g = mine_[static_cast<std::size_t>(r)];
      const char* const now = memory_.back().data() + r * stride;
      const char* const before = untouched_.data() + r * stride;
      const std::int64_t own = g < 0 ? 0 : spec.n * size;
      ASSERT_TRUE(std::equal(now + own, now + stride, before + own))
          << "row " << r << ", what is not its own";
      if (g < 0 || (rows_ > 40 && r % (rows_ / 40 + 1) != 0 && r + 1 != rows_)) continue;
      std::vector<double> x(static_cast<std::size_t>(spec.k));
      double largest = 0;
      for (std::int64_t i = 0; i < spec.k; ++i) {
        x[static_cast<std::size_t>(i)] = value(r, i);
        largest = std::max(largest, std::abs(value(r, i)));
      }
      for (std::int64_t n = 0; n < spec.n; ++n) {
        double want = 0, terms = 0, weights = 0;
        for (std::int64_t i = 0; i < spec.k; ++i) {
          const double term = weight(g, n, i) * x[static_cast<std::size_t>(i)];
          want += term;
          terms += std::abs(term);
          weights += std::abs(weight(g, n, i));
        }
        // The CPU multiplies packed weights by rows as integers (docs/formats.md).
        const double moved = held_.empty() ? 0 : 0x1p-14 * largest * weights;
        if (spec.bias) {
          const double bias =
              static_cast<double>(load_f32(bias_.data, bias_.dtype, g * spec.n + n));
          want += bias;
          terms += std::abs(bias);
        }
        const auto got = static_cast<double>(load_f32(now, d.out_dtype, n));
        ASSERT_TRUE(std::abs(got - want) <= bound(terms, want) + moved)
            << "row " << r << " of group " << g << ", column " << n << ": " << got << " instead of "
            << want << ", terms " << terms;
      }
    }
  }

 private:
  Tensor filled(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                float deviation) {
    std::normal_distribution<float> normal(0, deviation);
    auto& data = memory_.emplace_back(static_cast<std::size_t>(rows * stride * bits(dtype) / 8));
    for (std::int64_t i = 0; i < rows * stride; ++i) {
      const bool between = i % stride >= columns;
      store_f32(data.data(), dtype, i, between ? std::nanf("") : normal(random_));
    }
    Tensor t = view(data.data(), dtype, {rows, columns});
    t.strides[0] = stride;
    return t;
  }
  // [R, columns], or [groups, capacity, columns].
  Tensor shaped(const Tensor& flat, std::int64_t columns) const {
    if (d.walk == Walk::ragged) return flat;
    Tensor t = view(flat.data, flat.dtype, {d.spec.groups, d.capacity, columns});
    t.strides[0] = d.capacity * flat.strides[0];
    t.strides[1] = flat.strides[0];
    return t;
  }
  Tensor per_row() const {
    return d.walk == Walk::ragged ? view(scales_.data, DType::f32, {rows_})
                                  : view(scales_.data, DType::f32, {d.spec.groups, d.capacity});
  }
  void make_matrices() {
    const GroupedGemmSpec& spec = d.spec;
    const float deviation = 1 / std::sqrt(static_cast<float>(spec.k));
    const std::int64_t n = spec.n, k = spec.k;
    if (spec.format != FormatSpec{}) {
      for (int g = 0; g < spec.groups; ++g) {
        matrices_.push_back(
            Packed::of(spec.format, normal_values(n * k, random_(), deviation), n, k));
        held_.push_back(matrices_.back().values());
      }
      for (const Packed& one : matrices_) packed_.push_back(one.packed);
      return;
    }
    weights_ = filled(spec.dtype, spec.groups * n, k, k, deviation);
    weights_ = view(weights_.data, spec.dtype, {spec.groups, n, k});
    if (d.transposed) {
      weights_ = view(weights_.data, spec.dtype, {spec.groups, k, n});
      std::swap(weights_.shape[1], weights_.shape[2]);
      std::swap(weights_.strides[1], weights_.strides[2]);
    }
  }
  // Rows of groups; what lies elsewhere is NaN.
  void make_rows() {
    const std::int64_t k = d.spec.k, stride = k + d.gap;
    const Tensor plain = filled(d.rows_rounded ? DType::f32 : d.rows_dtype, rows_, k, stride, 1);
    const std::int64_t block = d.spec.rows == RowFormat::fp8_token ? k : 128,
                       blocks = (k + block - 1) / block;
    for (std::int64_t r = 0; r < rows_; ++r) {
      for (std::int64_t i = 0; mine_[static_cast<std::size_t>(r)] < 0 && i < k; ++i) {
        store_f32(plain.data, plain.dtype, r * stride + i, std::nanf(""));
      }
    }
    x_ = plain;
    if (!d.rows_rounded) return;
    auto& codes = memory_.emplace_back(static_cast<std::size_t>(rows_ * stride), '\x7f');
    scales_ = filled(DType::f32, rows_, blocks, blocks, 1);
    for (std::int64_t r = 0; r < rows_; ++r) {
      if (mine_[static_cast<std::size_t>(r)] < 0) continue;
      const float* const row = plain.as<float>() + r * stride;
      const test::Fp8Row rounded(std::vector<float>(row, row + k), block);
      std::copy(rounded.bytes.begin(), rounded.bytes.end(), codes.begin() + r * stride);
      std::copy(rounded.scales.begin(), rounded.scales.end(), scales_.as<float>() + r * blocks);
    }
    x_ = view(static_cast<const void*>(codes.data()), DType::f8_e4m3, {rows_, k});
    x_.strides[0] = stride;
  }
  // As it is multiplied, but for rows that a product rounds to fp8.
  double value(std::int64_t r, std::int64_t i) const {
    const std::int64_t at = r * x_.strides[0] + i;
    if (d.rows_rounded) {
      const std::int64_t block = d.spec.rows == RowFormat::fp8_token ? 0 : i / 128;
      return static_cast<double>(e4m3_to_f32(x_.as<std::uint8_t>()[at])) *
             static_cast<double>(scales_.as<float>()[r * scales_.strides[0] + block]);
    }
    const float x = load_f32(x_.data, x_.dtype, at);
    if (d.spec.rows != RowFormat::as_dtype || d.spec.dtype == DType::f32)
      return static_cast<double>(x);
    char rounded[4];
    store_f32(rounded, d.spec.dtype, 0, x);
    return static_cast<double>(load_f32(rounded, d.spec.dtype, 0));
  }
  double weight(int g, std::int64_t n, std::int64_t i) const {
    if (!held_.empty())
      return static_cast<double>(
          held_[static_cast<std::size_t>(g)][static_cast<std::size_t>(n * d.spec.k + i)]);
    return static_cast<double>(
        load_f32(weights_.data, weights_.dtype,
                 g * weights_.strides[0] + n * weights_.strides[1] + i * weights_.strides[2]));
  }
  // Of sums in f32, of tensor cores that keep 13 bits behind the first of 32 products of e4m3, of
  // rows in e4m3, and of the result in its dtype.
  double bound(double terms, double want) const {
    const bool fp8 = d.spec.rows != RowFormat::as_dtype;
    const double out = d.out_dtype == DType::bf16  ? 0x1p-8
                       : d.out_dtype == DType::f16 ? 0x1p-11
                                                   : 0;
    return terms * ((fp8 ? 4 * 33 * 0x1p-13 : 0x1p-16) + (fp8 && !d.rows_rounded ? 0x1p-4 : 0) +
                    decoded()) +
           1.01 * out * std::abs(want) + 1e-6;
  }

  // By how much of itself a weight is off in 16 bits, where those do not hold it.
  double decoded() const {
    const bool bf16 = d.spec.dtype == DType::bf16;
    if (d.spec.dtype == DType::f32 || d.spec.rows != RowFormat::as_dtype) return 0;
    switch (d.spec.format.format) {
      case Format::int4:
        return bf16 ? 0x1.01p-7 : 0x1p-10;
      case Format::dense3:
        return bf16 ? 0x1p-8 : 0x1p-11;
      default:
        return 0;
    }
  }

  const DrawnProduct& d;
  std::mt19937 random_;
  std::vector<std::int64_t> firsts_;
  std::vector<std::int32_t> offsets_;
  std::int64_t rows_ = 0;
  std::vector<int> mine_;  // the group of a row, or -1
  std::deque<std::vector<char>> memory_;
  std::vector<char> initial_, untouched_;
  std::deque<Packed> matrices_;
  std::vector<PackedMatrix> packed_;
  std::vector<std::vector<float>> held_;
  Tensor weights_, x_, scales_, bias_, out_;
};

bool check(unsigned seed) {
  const DrawnProduct drawn(seed);
  SCOPED_TRACE("seed " + std::to_string(seed) + ": " + drawn.text());
  const Context context = test::engine(drawn.threads);
  if (const Support support = supports(drawn.spec, context.device()); !support) {
    EXPECT_THROW((void)grouped_gemm_workspace_bytes(context, drawn.spec, 1), Error);
    return false;
  }
  Product product(drawn, seed + 1);
  const std::vector<char> first = product.run(context);
  product.expect_right();
  EXPECT_TRUE(product.run(context) == first) << "again";
  return true;
}

TEST(DrawnProducts, AreRightOrRefused) { test::each_seed(test::on_gpu() ? 300 : 150, check); }

}  // namespace
}  // namespace shunt
