// The walks of the grouped GEMM beside that by offsets: groups with room for as many rows each, of
// which the first are there (masked) or all (dense). What is not there is NaN on the way in and
// must stay as it was on the way out, and the others have the bits that the walk by offsets gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "engines.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/reference.hpp"
#include "shunt/format.hpp"
#include "shunt/gemm.hpp"
#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"
#include "gemm/hopper_product.hpp"
#endif

namespace shunt {
namespace {

using test::Array;
using test::random_array;

constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr float untouched = 7;

void fill(Array& array, float x) {
  for (std::int64_t i = 0; i < array.tensor.elements(); ++i) array.set(i, x);
}

struct Problem {
  GroupedGemmSpec spec;
  std::int64_t capacity = 0;
  std::vector<std::int32_t> counts;
  DType rows = DType::f32, out = DType::f32;
  std::int64_t row_gap = 0, out_gap = 0;  // elements between rows
};

// One group after the other, `capacity` rows each, of which counts say how many are there.
class Rooms {
 public:
  Problem p;
  Array rows, weights, bias;

  explicit Rooms(const Problem& problem, unsigned seed = 1)
      : p(problem),
        rows(random_array(p.rows, {p.spec.groups, p.capacity, p.spec.k + p.row_gap}, seed)),
        weights(random_array(p.spec.dtype, {p.spec.groups, p.spec.n, p.spec.k}, seed + 1)),
        bias(random_array(DType::f32, {p.spec.groups, p.spec.n}, seed + 2)) {
    const float usual = 1 / std::sqrt(static_cast<float>(std::max<std::int64_t>(1, p.spec.k)));
    for (std::int64_t i = 0; i < weights.tensor.elements(); ++i) {
      weights.set(i, weights.get(i) * usual);
    }
    const std::int64_t pitch = p.spec.k + p.row_gap;
    for (std::int64_t i = 0; i < rows.tensor.elements(); ++i) {
      const std::int64_t row = i / pitch;
      if (i % pitch >= p.spec.k || !there(row)) rows.set(i, NAN);
    }
  }
  bool there(std::int64_t row) const {
    return row % p.capacity < p.counts[static_cast<std::size_t>(row / p.capacity)];
  }
  Tensor room_rows() const {
    Tensor x = rows.tensor;
    x.shape[2] = p.spec.k;
    return x;
  }

  // [groups * capacity, n + gap], by the walk that counts or, without them, full rooms give.
  Array run(const Context& context, bool with_counts = true, std::int64_t expected = 0) const {
    Array out(p.out, {p.spec.groups, p.capacity, p.spec.n + p.out_gap});
    fill(out, untouched);
    Tensor to = out.tensor;
    to.shape[2] = p.spec.n;
    test::Mirror mirror(context);
    GroupedGemmInputs in{.rows = mirror.in(room_rows()), .expected_rows = expected};
    if (with_counts) in.counts = mirror.in(view(p.counts.data(), {p.spec.groups}));
    multiply(context, mirror, in, to, p.spec.groups * p.capacity);
    return out;
  }
  // The same rows closer together and offsets: a row for each that is there, then `others`.
  Array run_ragged(const Context& context) const {
    std::vector<std::int32_t> offsets = {0};
    for (const auto count : p.counts) offsets.push_back(offsets.back() + count);
    Array close(p.rows, {offsets.back(), p.spec.k}), out(p.out, {offsets.back(), p.spec.n});
    const std::int64_t pitch = p.spec.k + p.row_gap;
    std::int64_t at = 0;
    for (std::int64_t r = 0; r < p.spec.groups * p.capacity; ++r) {
      if (!there(r)) continue;
      for (std::int64_t i = 0; i < p.spec.k; ++i) {
        close.set(at * p.spec.k + i, rows.get(r * pitch + i));
      }
      ++at;
    }
    test::Mirror mirror(context);
    const GroupedGemmInputs in{.rows = mirror.in(close.tensor),
                               .offsets = mirror.in(view(offsets.data(), {p.spec.groups + 1}))};
    multiply(context, mirror, in, out.tensor, offsets.back());
    return out;
  }
  // Of what run() gave: the same bits as `ragged` has where rows are, and nothing else touched.
  void check_bits(const Array& out, const Array& ragged) const {
    const std::int64_t pitch = p.spec.n + p.out_gap, width = bits(p.out) / 8;
    std::int64_t at = 0;
    for (std::int64_t r = 0; r < p.spec.groups * p.capacity; ++r) {
      for (std::int64_t j = there(r) ? p.spec.n : 0; j < pitch; ++j) {
        ASSERT_EQ(out.get(r * pitch + j), untouched) << "row " << r << " column " << j;
      }
      if (!there(r)) continue;
      ASSERT_EQ(std::memcmp(out.tensor.as<char>() + r * pitch * width,
                            ragged.tensor.as<char>() + at * p.spec.n * width,
                            static_cast<std::size_t>(p.spec.n * width)),
                0)
          << "row " << r;
      ++at;
    }
    ASSERT_EQ(at, ragged.tensor.shape[0]);
  }
  void check_values(const Array& out) const {
    std::vector<double> magnitude;
    const GroupedGemmInputs in{.rows = room_rows(),
                               .counts = view(p.counts.data(), {p.spec.groups}),
                               .weights = weights.tensor,
                               .bias = p.spec.bias ? bias.tensor : Tensor{}};
    const std::vector<double> want = grouped_gemm_reference(p.spec, in, &magnitude);
    const std::int64_t pitch = p.spec.n + p.out_gap;
    for (std::int64_t r = 0; r < p.spec.groups * p.capacity; ++r) {
      for (std::int64_t j = 0; j < pitch; ++j) {
        const float got = out.get(r * pitch + j);
        if (!there(r) || j >= p.spec.n) {
          ASSERT_EQ(got, untouched) << "row " << r << " column " << j;
          continue;
        }
        const auto at = static_cast<std::size_t>(r * p.spec.n + j);
        const double bound = test::sum_bound(p.spec.k, magnitude[at]) +
                             test::rounding(p.out) * std::abs(want[at]) * 1.01 + 1e-7;
        ASSERT_NEAR(static_cast<double>(got), want[at], bound)
            << "row " << r << " column " << j << " of [" << p.spec.n << ", " << p.spec.k << "] "
            << to_string(p.spec.dtype);
      }
    }
  }

 private:
  void multiply(const Context& context, test::Mirror& mirror, GroupedGemmInputs in, Tensor out,
                std::int64_t count) const {
    const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, p.spec, count));
    if (p.spec.bias) in.bias = mirror.in(bias.tensor);
    Buffer memory;
    if (p.spec.prepared) {
      std::vector<Tensor> matrices;
      for (int g = 0; g < p.spec.groups; ++g) matrices.push_back(weights.tensor[g]);
      memory = context.allocate(
          prepared_bytes(context, p.spec.dtype, p.spec.groups, p.spec.n, p.spec.k));
      in.prepared = prepare(context, p.spec.dtype, matrices, memory);
    } else {
      in.weights = mirror.in(weights.tensor);
    }
    grouped_gemm(context, p.spec, in, mirror.out(out), workspace);
    mirror.fetch();
  }
};

class GroupWalks : public testing::TestWithParam<test::Engine> {};

TEST_P(GroupWalks, MaskedRowsAgreeWithTheReference) {
  const Context context = test::context_of(GetParam(), 2);
  const std::int64_t shapes[][2] = {{1, 1}, {63, 31}, {65, 48}, {40, 2880}, {1408, 40}};
  unsigned seed = 10;
  for (const DType dtype : dtypes) {
    for (const auto& [n, k] : shapes) {
      for (const bool prepared : {true, false}) {
        const Rooms rooms({.spec = {.groups = 5,
                                    .n = n,
                                    .k = k,
                                    .dtype = dtype,
                                    .bias = seed % 2 == 0,
                                    .prepared = prepared},
                           .capacity = 13,
                           .counts = {0, 13, 1, 0, 7},
                           .rows = dtypes[seed % 3],
                           .out = dtypes[seed / 3 % 3]},
                          seed);
        rooms.check_values(rooms.run(context));
        ++seed;
      }
    }
  }
}

// Whatever the kernel was chosen for.
TEST_P(GroupWalks, MaskedRowsHaveTheBitsOfOffsets) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    for (const std::int64_t k : {72, 2880}) {
      const Rooms rooms({.spec = {.groups = 6,
                                  .n = k == 72 ? 136 : 40,
                                  .k = k,
                                  .dtype = dtype,
                                  .bias = true,
                                  .batch_invariant = true},
                         .capacity = 70,
                         .counts = {70, 0, 3, 65, 0, 8},
                         .rows = dtype,
                         .out = dtype});
      const Array ragged = rooms.run_ragged(context);
      for (const std::int64_t expected : {0, 1, 24, 1000}) {
        rooms.check_bits(rooms.run(context, true, expected), ragged);
      }
      rooms.check_bits(rooms.run(context), ragged);  // again
    }
  }
}

// Register tiles, blocks of rows and threads of the CPU engine; tiles of every height on a GPU.
TEST_P(GroupWalks, EveryCount) {
  const Context context = test::context_of(GetParam(), 2);
  std::vector<std::int32_t> counts;
  for (std::int32_t count = 0; count <= 40; ++count) counts.push_back(count);
  for (const DType dtype : dtypes) {
    const Rooms rooms({.spec = {.groups = 41, .n = 40, .k = 24, .dtype = dtype},
                       .capacity = 40,
                       .counts = counts,
                       .rows = dtype,
                       .out = dtype});
    rooms.check_values(rooms.run(context));
  }
  const Rooms tall({.spec = {.groups = 3, .n = 70, .k = 45, .dtype = DType::bf16},
                    .capacity = 450,
                    .counts = {300, 0, 449}});
  tall.check_values(tall.run(context));
}

TEST_P(GroupWalks, DenseGroupsAreFullRooms) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    for (const bool prepared : {true, false}) {
      const Rooms rooms({.spec = {.groups = 3,
                                  .n = 72,
                                  .k = 40,
                                  .dtype = dtype,
                                  .bias = true,
                                  .prepared = prepared,
                                  .batch_invariant = true},
                         .capacity = 70,
                         .counts = {70, 70, 70},
                         .rows = dtype,
                         .out = dtype});
      const Array ragged = rooms.run_ragged(context);
      const Array dense = rooms.run(context, false);
      rooms.check_values(dense);
      rooms.check_bits(dense, ragged);
      rooms.check_bits(rooms.run(context, true), ragged);
    }
  }
}

// Neither offsets nor a third dimension.
TEST_P(GroupWalks, OneGroupNeedsNothing) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    const GroupedGemmSpec spec{.groups = 1, .n = 40, .k = 72, .dtype = dtype, .prepared = false};
    const Array x = random_array(dtype, {33, 72}, 1), w = random_array(dtype, {1, 40, 72}, 2);
    Array out(DType::f32, {33, 40});
    const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, spec, 33));
    test::Mirror mirror(context);
    grouped_gemm(context, spec, {.rows = mirror.in(x.tensor), .weights = mirror.in(w.tensor)},
                 mirror.out(out.tensor), workspace);
    mirror.fetch();
    std::vector<double> magnitude;
    const std::vector<double> want =
        grouped_gemm_reference(spec, {.rows = x.tensor, .weights = w.tensor}, &magnitude);
    for (std::int64_t i = 0; i < out.tensor.elements(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_NEAR(static_cast<double>(out.get(i)), want[at], test::sum_bound(72, magnitude[at]));
    }
  }
}

TEST_P(GroupWalks, StridedRowsAndOut) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    for (const std::int64_t gap : {3, 8}) {
      const Rooms rooms({.spec = {.groups = 4, .n = 24, .k = 40, .dtype = dtype, .bias = true},
                         .capacity = 9,
                         .counts = {9, 2, 0, 8},
                         .rows = dtype,
                         .out = dtype,
                         .row_gap = gap,
                         .out_gap = gap});
      rooms.check_values(rooms.run(context));
    }
  }
}

TEST_P(GroupWalks, RoomForOneAndForNone) {
  const Context context = test::context_of(GetParam(), 2);
  for (const DType dtype : dtypes) {
    const Rooms one({.spec = {.groups = 5, .n = 24, .k = 40, .dtype = dtype},
                     .capacity = 1,
                     .counts = {1, 0, 1, 1, 0},
                     .rows = dtype});
    one.check_values(one.run(context));
    const Rooms alone({.spec = {.groups = 1, .n = 24, .k = 40, .dtype = dtype},
                       .capacity = 20,
                       .counts = {6},
                       .rows = dtype});
    alone.check_values(alone.run(context));
    const Rooms empty({.spec = {.groups = 3, .n = 24, .k = 40, .dtype = dtype},
                       .capacity = 10,
                       .counts = {0, 0, 0},
                       .rows = dtype});
    empty.check_values(empty.run(context));
    const Rooms none(
        {.spec = {.groups = 2, .n = 8, .k = 8, .dtype = dtype}, .counts = {0, 0}, .rows = dtype});
    none.run(context);
    none.run(context, false);
  }
}

// Packed weights of every format that this engine multiplies with rows as they are.
TEST_P(GroupWalks, PackedWeights) {
  const Context context = test::context_of(GetParam(), 2);
  const std::int64_t groups = 4, capacity = 20, n = 72, k = 128;
  const std::vector<std::int32_t> counts = {20, 0, 3, 9};
  const std::vector<std::int32_t> offsets = {0, 20, 20, 23, 32};
  for (const FormatSpec& format : known_formats()) {
    GroupedGemmSpec spec{.groups = 4,
                         .n = n,
                         .k = k,
                         .dtype = DType::bf16,
                         .format = format,
                         .batch_invariant = true};
    if (!supports(spec, context.device())) continue;
    SCOPED_TRACE(to_string(format));
    const Array numbers = random_array(DType::f32, {n, k}, 3);
    const Buffer bytes = cpu().allocate(packed_bytes(format, n, k));
    const std::vector<PackedMatrix> all(groups, pack(format, numbers.tensor, bytes));
    const Buffer memory =
        context.allocate(prepared_bytes(context, spec.dtype, format, spec.groups, n, k));
    const PreparedWeights prepared = prepare_packed(context, spec.dtype, all, memory);
    Array x = random_array(DType::bf16, {groups, capacity, k}, 4), close(DType::bf16, {32, k});
    Array out(DType::f32, {groups, capacity, n}), ragged(DType::f32, {32, n});
    fill(out, untouched);
    std::int64_t at = 0;
    for (std::int64_t r = 0; r < groups * capacity; ++r) {
      const bool there = r % capacity < counts[static_cast<std::size_t>(r / capacity)];
      for (std::int64_t i = 0; i < k; ++i) {
        if (there) close.set(at * k + i, x.get(r * k + i));
        if (!there) x.set(r * k + i, NAN);
      }
      at += there ? 1 : 0;
    }
    const Buffer workspace =
        context.allocate(grouped_gemm_workspace_bytes(context, spec, groups * capacity));
    test::Mirror mirror(context);
    grouped_gemm(context, spec,
                 {.rows = mirror.in(x.tensor),
                  .counts = mirror.in(view(counts.data(), {groups})),
                  .expected_rows = 8,
                  .prepared = prepared},
                 mirror.out(out.tensor), workspace);
    grouped_gemm(context, spec,
                 {.rows = mirror.in(close.tensor),
                  .offsets = mirror.in(view(offsets.data(), {groups + 1})),
                  .prepared = prepared},
                 mirror.out(ragged.tensor), workspace);
    mirror.fetch();
    at = 0;
    for (std::int64_t r = 0; r < groups * capacity; ++r) {
      const bool there = r % capacity < counts[static_cast<std::size_t>(r / capacity)];
      for (std::int64_t j = 0; j < n; ++j) {
        ASSERT_EQ(out.get(r * n + j), there ? ragged.get(at * n + j) : untouched)
            << "row " << r << " column " << j;
      }
      at += there ? 1 : 0;
    }
  }
}

// Counts that nobody can check: nothing outside the rooms is touched. Run under compute-sanitizer.
TEST(GroupWalksOnGpu, IllegalCountsAreCutOff) {
  if (!test::on_gpu()) GTEST_SKIP() << "about the CUDA engine";
  const Context context = cuda();
  for (const DType dtype : dtypes) {
    Rooms rooms({.spec = {.groups = 4, .n = 40, .k = 24, .dtype = dtype},
                 .capacity = 30,
                 .counts = {30, 0, 30, 0},
                 .rows = dtype});
    const Rooms legal(rooms.p);
    rooms.p.counts = {31, -1, std::numeric_limits<std::int32_t>::max(),
                      std::numeric_limits<std::int32_t>::min()};
    legal.check_values(rooms.run(context));
  }
}

#if SHUNT_CUDA_BUILT
TEST(GroupWalksOnGpu, AGraphFollowsTheCounts) {
  if (!test::on_gpu()) GTEST_SKIP() << "about the CUDA engine";
  for (const bool dependent : {false, true}) {
    for (const DType dtype : dtypes) {
      const test::Stream stream;
      const Context context = cuda({.stream = stream.get(), .dependent_launch = dependent});
      const std::int64_t capacity = 50, n = 40, k = 72;
      const GroupedGemmSpec spec{.groups = 6, .n = n, .k = k, .dtype = dtype, .prepared = false};
      const Array x = random_array(dtype, {6, capacity, k}, 1),
                  w = random_array(dtype, {6, n, k}, 2);
      Array out(DType::f32, {6, capacity, n});
      fill(out, untouched);
      std::vector<std::int32_t> counts(6, 0);
      test::Mirror mirror(context);
      const GroupedGemmInputs in{.rows = mirror.in(x.tensor),
                                 .counts = mirror.in(view(counts.data(), {6})),
                                 .expected_rows = 10,
                                 .weights = mirror.in(w.tensor)};
      const Tensor there = mirror.out(out.tensor);
      const test::Graph graph(stream, [&] { grouped_gemm(context, spec, in, there, {}); });
      std::vector<std::int32_t> most(6, 0);
      for (const std::vector<std::int32_t>& now : {std::vector<std::int32_t>{0, 0, 0, 0, 0, 0},
                                                   {0, 10, 0, 3, 1, 50},
                                                   {7, 0, 50, 0, 0, 0}}) {
        context.copy(in.counts.data, now.data(), now.size() * sizeof(std::int32_t));
        graph.replay();
        mirror.fetch();
        std::vector<double> magnitude;
        for (std::size_t g = 0; g < 6; ++g) most[g] = std::max(most[g], now[g]);
        const std::vector<double> want = grouped_gemm_reference(
            spec, {.rows = x.tensor, .counts = view(most.data(), {6}), .weights = w.tensor},
            &magnitude);
        for (std::int64_t i = 0; i < out.tensor.elements(); ++i) {
          const auto at = static_cast<std::size_t>(i);
          const std::int64_t row = i / n;
          if (row % capacity >= most[static_cast<std::size_t>(row / capacity)]) {
            ASSERT_EQ(out.get(i), untouched) << "row " << row;
          } else {
            ASSERT_NEAR(static_cast<double>(out.get(i)), want[at],
                        test::sum_bound(k, magnitude[at]) + 1e-7)
                << "row " << row;
          }
        }
      }
    }
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(All, GroupWalks, testing::ValuesIn(test::all_engines()),
                         [](const auto& set) { return test::engine_name(set.param); });

}  // namespace
}  // namespace shunt
