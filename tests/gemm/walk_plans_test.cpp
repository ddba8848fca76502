// Every kernel and tile that a plan may choose on Hopper, of plain, fp8 and decoded weights, over
// groups with room for as many rows each: the bits are those of the same plan over the same rows by
// offsets. What is not there is NaN on the way in, scales and all, and untouched on the way out.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "engine.hpp"
#include "gemm/fragment_prepare.hpp"
#include "gemm/fragment_product.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/on_hopper.hpp"
#include "gemm/packed_data.hpp"
#include "gemm/packed_prepare.hpp"
#include "gemm/packed_product.hpp"
#include "shunt/gemm.hpp"
#if SHUNT_CUDA_BUILT

namespace shunt {
namespace {

using cpu_engine::ActivationRule;
using test::Array;

// Rows in rooms and the same ones by offsets, on the device, with what they are multiplied into.
class Both {
 public:
  Both(const Context& context, DType rows, DType out, std::int64_t columns, std::int64_t k,
       std::int64_t capacity, const std::vector<std::int32_t>& counts)
      : context_(context),
        mirror_(context),
        groups_(static_cast<std::int64_t>(counts.size())),
        capacity_(capacity),
        counts_(counts),
        source_(test::random_array(DType::f32, {groups_ * capacity, k}, 5)) {
    offsets_.push_back(0);
    for (const auto count : counts) offsets_.push_back(offsets_.back() + count);
    const std::int64_t blocks = (k + 127) / 128, all = groups_ * capacity;
    for (int w = 0; w < 2; ++w) {
      const std::int64_t size = w == 0 ? all : offsets_.back();
      rows_[w] = std::make_unique<Array>(rows, std::initializer_list<std::int64_t>{size, k});
      scales_[w] =
          std::make_unique<Array>(DType::f32, std::initializer_list<std::int64_t>{size, blocks});
      out_[w] = std::make_unique<Array>(out, std::initializer_list<std::int64_t>{size, columns});
    }
    std::int64_t at = 0;
    for (std::int64_t r = 0; r < all; ++r) {
      const bool here = there(r);
      for (std::int64_t i = 0; i < k; ++i) {
        set(*rows_[0], r * k + i, here ? source_.get(r * k + i) : NAN);
        if (here) set(*rows_[1], at * k + i, source_.get(r * k + i));
      }
      for (std::int64_t b = 0; b < blocks; ++b) {
        const float scale = 0.5f + static_cast<float>((r + 3 * b) % 7);
        scales_[0]->set(r * blocks + b, here ? scale : NAN);
        if (here) scales_[1]->set(at * blocks + b, scale);
      }
      at += here ? 1 : 0;
    }
    counts_there = mirror_.in(view(counts_.data(), {groups_})).as<const std::int32_t>();
    offsets_there = mirror_.in(view(offsets_.data(), {groups_ + 1})).as<const std::int32_t>();
    for (std::size_t w = 0; w < 2; ++w) {
      rows_there[w] = mirror_.in(rows_[w]->tensor);
      scales_there[w] = mirror_.in(scales_[w]->tensor);
      out_there[w] = mirror_.out(out_[w]->tensor);
    }
  }

  // `masked` as it is over rooms, and over rows by offsets, under each plan.
  template <class Product, class Plans>
  void compare(Product masked, const Plans& plans) {
    Product ragged = masked;
    masked.counts = counts_there, masked.rows = rows_there[0], masked.out = out_there[0];
    ragged.offsets = offsets_there, ragged.rows = rows_there[1], ragged.out = out_there[1];
    if constexpr (requires { masked.row_scales; }) {
      if (masked.rows.dtype == DType::f8_e4m3) {
        masked.row_scales = scales_there[0], ragged.row_scales = scales_there[1];
        if (masked.layout.format != Format::fp8_block) {
          masked.row_scales.rank = ragged.row_scales.rank = 1;
        }
      }
    }
    const auto all = plans(cuda_engine::sizes_of(masked));
    ASSERT_GE(all.size(), test::on_hopper() ? 4U : 2U);
    for (const auto& plan : all) {
      SCOPED_TRACE(testing::Message() << "kernel " << static_cast<int>(plan.kernel) << ", tiles of "
                                      << plan.tile_tokens << ", split " << plan.split << ", "
                                      << plan.blocks << " blocks");
      clear();
      ASSERT_TRUE(cuda_engine::multiply_as_planned(context_.gpu(), plan, ragged));
      ASSERT_TRUE(cuda_engine::multiply_as_planned(context_.gpu(), plan, masked));
      check();
      if (testing::Test::HasFatalFailure()) return;
    }
  }

  std::int64_t groups() const { return groups_; }

 private:
  bool there(std::int64_t row) const {
    return row % capacity_ < counts_[static_cast<std::size_t>(row / capacity_)];
  }
  static void set(Array& array, std::int64_t i, float x) {
    if (array.tensor.dtype != DType::f8_e4m3) return array.set(i, x);
    array.tensor.as<std::uint8_t>()[i] = to_e4m3(100 * x);
  }
  void clear() {
    for (int w = 0; w < 2; ++w) {
      for (std::int64_t i = 0; i < out_[w]->tensor.elements(); ++i) {
        out_[w]->set(i, w == 0 ? 7.0f : 9.0f);
      }
      context_.copy(out_there[static_cast<std::size_t>(w)].data, out_[w]->tensor.data,
                    static_cast<std::size_t>(out_[w]->tensor.bytes()));
    }
  }
  void check() {
    mirror_.fetch();
    const std::int64_t columns = out_[0]->tensor.shape[1];
    const auto line = static_cast<std::size_t>(bytes(out_[0]->tensor.dtype, columns));
    std::size_t at = 0;
    for (std::int64_t r = 0; r < groups_ * capacity_; ++r) {
      if (!there(r)) {
        for (std::int64_t j = 0; j < columns; ++j) {
          ASSERT_EQ(out_[0]->get(r * columns + j), 7) << "row " << r << ", column " << j;
        }
        continue;
      }
      const char* const got = out_[0]->tensor.as<char>() + static_cast<std::size_t>(r) * line;
      ASSERT_EQ(std::memcmp(got, out_[1]->tensor.as<char>() + at * line, line), 0) << "row " << r;
      for (std::int64_t j = 0; j < columns; ++j) {
        ASSERT_TRUE(std::isfinite(out_[0]->get(r * columns + j))) << "row " << r;
      }
      ++at;
    }
  }

  Context context_;
  test::Mirror mirror_;
  std::int64_t groups_, capacity_;
  std::vector<std::int32_t> counts_, offsets_;
  Array source_;
  std::unique_ptr<Array> rows_[2], scales_[2], out_[2];
  const std::int32_t *counts_there = nullptr, *offsets_there = nullptr;
  std::array<Tensor, 2> rows_there, scales_there, out_there;
};

// Empty and full groups, ends within every tile's height, a first tile that is not group 0's.
const std::vector<std::int32_t> some = {0, 1, 130, 0, 64, 65, 7, 0, 33};
// More groups than a warp's lanes, more than few_rows looks at before there is a list.
std::vector<std::int32_t> many_groups(int groups) {
  std::vector<std::int32_t> counts;
  for (int g = 0; g < groups; ++g) counts.push_back(g % 3 == 0 ? 0 : g % 7 == 0 ? 11 : g % 5);
  return counts;
}

void plain_weights(DType dtype, DType out, std::int64_t n, std::int64_t k, bool paired,
                   std::int64_t capacity, const std::vector<std::int32_t>& counts) {
  const Context context = cuda();
  SCOPED_TRACE(std::string(to_string(dtype)) + " to " + to_string(out));
  Both both(context, dtype, out, paired ? n / 2 : n, k, capacity, counts);
  const auto groups = static_cast<int>(both.groups());
  const Array w = test::random_array(dtype, {groups, n, k}, 2);
  std::vector<Tensor> gate, up;
  for (int g = 0; g < groups; ++g) {
    gate.push_back(paired ? w.tensor[g].rows(0, n / 2) : w.tensor[g]);
    if (paired) up.push_back(w.tensor[g].rows(n / 2, n));
  }
  const Buffer memory = context.allocate(prepared_bytes(context, dtype, groups, n, k, paired));
  const PreparedWeights prepared = paired ? prepare_paired(context, dtype, gate, up, memory)
                                          : prepare(context, dtype, gate, memory);
  cuda_engine::GroupedProduct product{
      .layout = {dtype, n, k, paired}, .groups = groups, .prepared = prepared.data};
  if (paired) product.activation = {.kind = ActivationRule::silu};
  both.compare(product, [&](const cuda_engine::ProductSizes& sizes) {
    const auto figures = cuda_engine::figures(context.gpu());
    const auto all = cuda_engine::candidates(sizes, figures);
    const auto portable = cuda_engine::portable_candidates(sizes, figures);
    std::vector<cuda_engine::ProductPlan> plans(all.begin(), all.end() - 1);  // it is portable
    plans.insert(plans.end(), portable.begin(), portable.end());
    return plans;
  });
}

TEST(WalkPlans, PlainWeights) {
  SHUNT_ON_HOPPER_ONLY();
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const DType out : {dtype, DType::f32}) {
      plain_weights(dtype, out, 264, 328, false, 130, some);
      plain_weights(dtype, out, 272, 136, true, 131, some);
    }
    plain_weights(dtype, dtype, 136, 1048, false, 130, some);  // k shared out among four
  }
  for (const int groups : {40, 300}) {
    plain_weights(DType::bf16, DType::bf16, 40, 72, false, 11, many_groups(groups));
  }
}

void fp8_weights(Format format, DType rows, DType out, std::int64_t n, std::int64_t k,
                 std::int64_t capacity, const std::vector<std::int32_t>& counts) {
  const Context context = cuda();
  SCOPED_TRACE(to_string(FormatSpec{format}) + ", rows " + to_string(rows) + " to " +
               to_string(out));
  Both both(context, rows, out, n, k, capacity, counts);
  const auto groups = static_cast<int>(both.groups());
  const test::Fp8Matrix matrix(format, n, k, 3);
  const FormatSpec spec{.format = format};
  const RowFormat for_rows =
      format == Format::fp8_block ? RowFormat::fp8_block : RowFormat::fp8_token;
  const Buffer memory =
      context.allocate(prepared_bytes(context, DType::bf16, spec, groups, n, k, false, for_rows));
  const PreparedWeights prepared = prepare_packed(
      context, DType::bf16,
      std::vector<PackedMatrix>(static_cast<std::size_t>(groups), matrix.matrix), memory, for_rows);
  both.compare(
      cuda_engine::PackedProduct{
          .layout = cuda_engine::layout_of(prepared), .groups = groups, .prepared = prepared.data},
      [&](const cuda_engine::PackedSizes& sizes) {
        const auto all = cuda_engine::candidates(sizes, cuda_engine::figures(context.gpu()));
        return std::vector<cuda_engine::PackedPlan>(all.begin(), all.end());
      });
}

TEST(WalkPlans, Fp8Weights) {
  SHUNT_ON_HOPPER_ONLY();
  for (const DType out : {DType::bf16, DType::f32}) {
    fp8_weights(Format::fp8_block, DType::f8_e4m3, out, 264, 1040, 130, some);
    fp8_weights(Format::fp8_block, DType::bf16, out, 264, 328, 130, some);
    fp8_weights(Format::fp8_channel, DType::f8_e4m3, out, 136, 272, 131, some);
  }
  fp8_weights(Format::fp8_block, DType::f8_e4m3, DType::bf16, 40, 144, 11, many_groups(300));
}

void decoded_weights(const FormatSpec& format, DType dtype, std::int64_t n, std::int64_t k,
                     std::int64_t capacity, const std::vector<std::int32_t>& counts) {
  const Context context = cuda();
  SCOPED_TRACE(to_string(format) + " with " + to_string(dtype));
  Both both(context, dtype, dtype, n, k, capacity, counts);
  const auto groups = static_cast<int>(both.groups());
  const Array numbers = test::random_array(DType::f32, {n, k}, 3);
  const Buffer bytes = cpu().allocate(packed_bytes(format, n, k));
  const std::vector<PackedMatrix> all(static_cast<std::size_t>(groups),
                                      pack(format, numbers.tensor, bytes));
  const Buffer memory = context.allocate(prepared_bytes(context, dtype, format, groups, n, k));
  const PreparedWeights prepared = prepare_packed(context, dtype, all, memory);
  both.compare(cuda_engine::FragmentProduct{.layout = cuda_engine::fragments_of(prepared),
                                            .groups = groups,
                                            .prepared = prepared.data},
               [&](const cuda_engine::PackedSizes& sizes) {
                 return test::every_fragment_plan(sizes, cuda_engine::figures(context.gpu()));
               });
}

TEST(WalkPlans, DecodedWeights) {
  SHUNT_ON_GPU_ONLY();
  for (const FormatSpec& format : known_formats()) {
    decoded_weights(format, DType::bf16, 136, 1056, 130, some);
  }
  decoded_weights({.format = Format::nvfp4}, DType::f16, 264, 272, 131, some);
  decoded_weights({.format = Format::nvfp4}, DType::bf16, 40, 144, 11, many_groups(300));
}

}  // namespace
}  // namespace shunt
#endif
