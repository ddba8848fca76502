// What only the GPU's grouped GEMM has to answer for: sizes that it alone reads, graphs, illegal
// values that nobody can check.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "engine.hpp"
#include "gemm/fused.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/reference.hpp"
#include "shunt/gemm.hpp"
#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"
#endif

namespace shunt {
namespace {

using test::Array;
using test::random_array;

constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f16};

std::vector<Tensor> list(const Array& weights) {
  std::vector<Tensor> matrices;
  for (std::int64_t g = 0; g < weights.tensor.shape[0]; ++g) matrices.push_back(weights.tensor[g]);
  return matrices;
}

// Weights, rows and what they give, kept on the device.
struct OnDevice {
  Context context;
  GroupedGemmSpec spec;
  std::int64_t count;
  Array rows, weights, out;
  std::vector<std::int32_t> offsets;
  Buffer memory, workspace;
  test::Mirror mirror;
  GroupedGemmInputs in{};
  Tensor there{};

  OnDevice(const Context& where, DType dtype, int groups, std::int64_t n, std::int64_t k,
           std::int64_t rows_count, DType out_dtype = DType::f32)
      : context(where),
        spec{.groups = groups, .n = n, .k = k, .dtype = dtype},
        count(rows_count),
        rows(random_array(dtype, {count, k}, 1)),
        weights(random_array(dtype, {groups, n, k}, 2)),
        out(out_dtype, {count, n}),
        offsets(static_cast<std::size_t>(groups) + 1, 0),
        memory(context.allocate(prepared_bytes(context, dtype, groups, n, k))),
        workspace(context.allocate(grouped_gemm_workspace_bytes(context, spec, count))),
        mirror(context) {
    in.rows = mirror.in(rows.tensor);
    in.offsets = mirror.in(view(offsets.data(), {groups + 1}));
    in.prepared = prepare(context, dtype, list(weights), memory);
    for (std::int64_t i = 0; i < out.tensor.elements(); ++i) out.set(i, 7);
    there = mirror.out(out.tensor);
  }
  void enqueue() { grouped_gemm(context, spec, in, there, workspace); }
  void set_offsets(const std::vector<std::int32_t>& values) {
    offsets = values;
    context.copy(in.offsets.data, offsets.data(), offsets.size() * sizeof(std::int32_t));
  }
  void check() {
    mirror.fetch();
    std::vector<double> magnitude;
    const std::vector<double> want =
        grouped_gemm_reference(spec,
                               {.rows = rows.tensor,
                                .offsets = view(offsets.data(), {spec.groups + 1}),
                                .weights = weights.tensor},
                               &magnitude);
    for (std::int64_t i = 0; i < out.tensor.elements(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (i / spec.n >= offsets.back()) {
        ASSERT_EQ(out.get(i), 7) << "row " << i / spec.n << " is past the last offset";
      } else {
        ASSERT_NEAR(static_cast<double>(out.get(i)), want[at],
                    test::sum_bound(spec.k, magnitude[at]) + 1e-7)
            << "row " << i / spec.n << " column " << i % spec.n;
      }
    }
  }
};

// More groups than a warp's lanes, tiles of every height, columns and k that end within a tile.
TEST(GroupedGemmOnGpu, ManyRaggedGroups) {
  SHUNT_ON_GPU_ONLY();
  for (const DType dtype : dtypes) {
    OnDevice on(cuda(), dtype, 150, 72, 100, 1500);
    std::vector<std::int32_t> offsets = {0};
    for (int g = 0; g < 150; ++g) {
      const int size = g % 3 == 0 ? 0 : g == 70 ? 333 : g * 7 % 13;
      offsets.push_back(std::min(1500, offsets.back() + size));
    }
    on.set_offsets(offsets);
    on.enqueue();
    on.check();
  }
}

TEST(GroupedGemmOnGpu, LastOfManyGroups) {
  SHUNT_ON_GPU_ONLY();
  OnDevice on(cuda(), DType::bf16, 1000, 8, 16, 5);
  std::vector<std::int32_t> offsets(1001, 0);
  offsets[1000] = 5;
  on.set_offsets(offsets);
  on.enqueue();
  on.check();
}

// Whatever offsets hold, nothing outside the tensors is touched: run under compute-sanitizer.
TEST(GroupedGemmOnGpu, IllegalOffsetsAreSurvived) {
  SHUNT_ON_GPU_ONLY();
  for (const std::vector<std::int32_t>& offsets :
       {std::vector<std::int32_t>{0, 1 << 30, 5, 100}, {-7, 3, 2, 50}, {90, -1, 2000000000, 0}}) {
    OnDevice on(cuda(), DType::bf16, 3, 40, 24, 100);
    on.set_offsets(offsets);
    on.enqueue();
    EXPECT_NO_THROW(on.context.synchronize());
  }
}

TEST(GroupedGemmOnGpu, IllegalPermutationIsReadAsZeros) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  const std::int64_t n = 24, k = 32;
  const Array x = random_array(DType::bf16, {4, k}, 3);
  const Array w = random_array(DType::bf16, {1, n, k}, 4);
  const Buffer memory = context.allocate(prepared_bytes(context, DType::bf16, 1, n, k));
  const PreparedWeights prepared = prepare(context, DType::bf16, list(w), memory);
  const std::vector<std::int32_t> offsets = {0, 5}, permutation = {0, -1, 8, 2000000000, 7};
  Array out(DType::f32, {5, n});
  for (std::int64_t i = 0; i < 5 * n; ++i) out.set(i, 7);
  test::Mirror mirror(context);
  mlp_gemm(context, prepared,
           {.rows = mirror.in(x.tensor),
            .offsets = mirror.in(view(offsets.data(), {2})).as<const std::int32_t>(),
            .permutation = mirror.in(view(permutation.data(), {5})).as<const std::int32_t>(),
            .slots = 2},
           mirror.out(out.tensor), {});
  mirror.fetch();
  for (std::int64_t j = 0; j < n; ++j) {
    for (const std::int64_t row : {1, 2, 3}) EXPECT_EQ(out.get(row * n + j), 0);
    EXPECT_NE(out.get(j), 0);
    EXPECT_NE(out.get(4 * n + j), 0);
  }
}

// One group without offsets, of the first `valid` rows.
TEST(GroupedGemmOnGpu, OneGroupOfTheValidRows) {
  SHUNT_ON_GPU_ONLY();
  const Context context = cuda();
  const std::int64_t n = 24, k = 32;
  const Array x = random_array(DType::bf16, {90, k}, 3);
  const Array w = random_array(DType::bf16, {1, n, k}, 4);
  const Buffer memory = context.allocate(prepared_bytes(context, DType::bf16, 1, n, k));
  const PreparedWeights prepared = prepare(context, DType::bf16, list(w), memory);
  for (const std::int32_t valid : {-4, 0, 1, 70, 90, 1000}) {
    Array out(DType::f32, {90, n});
    for (std::int64_t i = 0; i < 90 * n; ++i) out.set(i, 7);
    test::Mirror mirror(context);
    mlp_gemm(context, prepared,
             {.rows = mirror.in(x.tensor),
              .valid = mirror.in(view(&valid, {1})).as<const std::int32_t>()},
             mirror.out(out.tensor), {});
    mirror.fetch();
    for (std::int64_t i = 0; i < 90 * n; ++i) {
      EXPECT_EQ(out.get(i) == 7, i / n >= valid) << valid << " row " << i / n;
    }
  }
}

TEST(GroupedGemmOnGpu, RunTwiceGivesTheSameBits) {
  SHUNT_ON_GPU_ONLY();
  for (const DType dtype : dtypes) {
    OnDevice on(cuda(), dtype, 20, 130, 260, 700);
    std::vector<std::int32_t> offsets = {0};
    for (int g = 0; g < 20; ++g) offsets.push_back(offsets.back() + g * 7 % 70);
    on.set_offsets(offsets);
    on.enqueue();
    on.mirror.fetch();
    const std::vector<std::uint32_t> first = on.out.data;
    for (int again = 0; again < 5; ++again) {
      on.enqueue();
      on.mirror.fetch();
      EXPECT_EQ(on.out.data, first);
    }
  }
}

#if SHUNT_CUDA_BUILT
TEST(GroupedGemmOnGpu, AGraphFollowsTheOffsets) {
  SHUNT_ON_GPU_ONLY();
  for (const bool dependent : {false, true}) {
    for (const DType dtype : dtypes) {
      const test::Stream stream;
      OnDevice on(cuda({.stream = stream.get(), .dependent_launch = dependent}), dtype, 6, 40, 72,
                  300);
      const test::Graph graph(stream, [&] { on.enqueue(); });
      for (const std::vector<std::int32_t>& offsets :
           {std::vector<std::int32_t>{0, 0, 0, 0, 0, 0, 0},
            {0, 10, 10, 150, 151, 151, 200},
            {0, 0, 0, 0, 0, 0, 300}}) {
        on.set_offsets(offsets);
        graph.replay();
        on.check();
      }
    }
  }
}
#endif

}  // namespace
}  // namespace shunt
