// GPTQ's order of activations on the engine that tests run on: as if weights and rows were sorted.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "checkpoint/temporary.hpp"
#include "engine.hpp"
#include "gemm/fragment_layout.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/ordered_data.hpp"
#include "shunt/gemm.hpp"
#include "shunt/indexed_gemm.hpp"
#include "shunt/safetensors.hpp"

namespace shunt::test {
namespace {

constexpr DType bf16 = DType::bf16, f16 = DType::f16, f32 = DType::f32;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// Four groups: three orders, and a matrix without one.
struct Four {
  std::int64_t n, k;
  int group;
  std::vector<Ordered> ordered;
  std::vector<PackedMatrix> shuffled, sorted;

  Four(std::int64_t columns, std::int64_t length, int of_scale)
      : n(columns), k(length), group(of_scale) {
    for (unsigned g = 0; g < 3; ++g) ordered.emplace_back(n, k, group, g + 1);
    for (const Ordered& o : ordered) {
      shuffled.push_back(o.shuffled);
      sorted.push_back(o.sorted.packed);
    }
    shuffled.push_back(sorted[0]);
    sorted.push_back(sorted[0]);
  }
  // Where a group's k belongs in the sorted one.
  std::int64_t place(int g, std::int64_t i) const {
    return g < 3 ? ordered[at(g)].place[at(i)] : i;
  }
  FormatSpec format(bool in_order) const { return {Format::int4, group, in_order}; }
};

// The product of all rows, as the bits of `out`.
std::vector<std::uint32_t> multiply(const Context& context, const Four& of, bool in_order,
                                    DType dtype, const Array& rows, const Tensor& offsets,
                                    const Tensor& counts, DType out_dtype) {
  const std::vector<PackedMatrix>& matrices = in_order ? of.shuffled : of.sorted;
  const FormatSpec format = of.format(in_order);
  const GroupedGemmSpec gemm{.groups = 4, .n = of.n, .k = of.k, .dtype = dtype, .format = format};
  const Buffer memory = context.allocate(prepared_bytes(context, dtype, format, 4, of.n, of.k));
  const PreparedWeights prepared = prepare_packed(context, dtype, matrices, memory);
  EXPECT_EQ(prepared.format, format);
  const std::int64_t count =
      rows.tensor.rank == 3 ? 4 * rows.tensor.shape[1] : rows.tensor.shape[0];
  const Buffer workspace = context.allocate(grouped_gemm_workspace_bytes(context, gemm, count));
  Array out = rows.tensor.rank == 3 ? Array(out_dtype, {4, rows.tensor.shape[1], of.n})
                                    : Array(out_dtype, {count, of.n});
  Mirror mirror(context);
  grouped_gemm(context, gemm,
               {.rows = mirror.in(rows.tensor),
                .offsets = mirror.in(offsets),
                .counts = mirror.in(counts),
                .prepared = prepared},
               mirror.out(out.tensor), workspace);
  mirror.fetch();
  return out.data;
}

constexpr std::array<std::array<std::int64_t, 3>, 4> shapes = {
    {{6, 32, 16}, {70, 100, 32}, {200, 264, 64}, {264, 520, 128}}};

// Groups of a few rows, some and many, so that a GPU's kernels for each have their turn.
TEST(OrderedGemm, MultipliesAsIfSorted) {
  const Context context = engine();
  for (const auto& [n, k, group] : shapes) {
    const Four of(n, k, static_cast<int>(group));
    for (const std::vector<std::int32_t>& offsets : {std::vector<std::int32_t>{0, 3, 3, 8, 9},
                                                     {0, 60, 100, 101, 180},
                                                     {0, 300, 520, 521, 700}}) {
      for (const DType dtype : {bf16, f16}) {
        for (const DType from : {dtype, f32}) {
          SCOPED_TRACE(testing::Message()
                       << n << " x " << k << " by " << group << ", " << offsets[4] << " rows "
                       << to_string(from) << ", " << to_string(dtype));
          const std::int64_t rows = offsets[4];
          const Array x = random_array(from, {rows, k}, 3);
          Array y(from, {rows, k});
          for (int g = 0; g < 4; ++g) {
            for (std::int64_t r = offsets[at(g)]; r < offsets[at(g) + 1]; ++r) {
              for (std::int64_t i = 0; i < k; ++i) {
                y.set(r * k + of.place(g, i), x.get(r * k + i));
              }
            }
          }
          const Tensor where = view(offsets.data(), {5});
          const auto got = multiply(context, of, true, dtype, x, where, {}, bf16);
          EXPECT_EQ(got, multiply(context, of, true, dtype, x, where, {}, bf16)) << "again";
          if (from == dtype || !on_gpu()) {
            EXPECT_EQ(got, multiply(context, of, false, dtype, y, where, {}, bf16));
          } else {
            // Rows are converted before: the kernel is the one of converted rows.
            Array z(dtype, {rows, k});
            for (std::int64_t i = 0; i < rows * k; ++i) z.set(i, y.get(i));
            EXPECT_EQ(got, multiply(context, of, false, dtype, z, where, {}, bf16));
          }
        }
      }
    }
  }
}

// Rows that a GPU's shared memory does not hold, and rows that take all of it that a kernel has
// without asking for more.
TEST(OrderedGemm, LongRows) {
  const Context context = engine();
  for (const std::int64_t k : {6144, 30000}) {
    SCOPED_TRACE(k);
    const Four of(6, k, 16);
    const std::vector<std::int32_t> offsets = {0, 2, 2, 3, 5};
    const Array x = random_array(bf16, {5, k}, 3);
    Array y(bf16, {5, k});
    for (std::int64_t r = 0; r < 5; ++r) {
      const int g = r < 2 ? 0 : r < 3 ? 2 : 3;
      for (std::int64_t i = 0; i < k; ++i) y.set(r * k + of.place(g, i), x.get(r * k + i));
    }
    const Tensor where = view(offsets.data(), {5});
    EXPECT_EQ(multiply(context, of, true, bf16, x, where, {}, f32),
              multiply(context, of, false, bf16, y, where, {}, f32));
  }
}

TEST(OrderedGemm, RowsMayStandApart) {
  const Context context = engine();
  const Four of(70, 100, 32);
  const std::vector<std::int32_t> counts = {3, 0, 7, 5};
  const Array x = random_array(bf16, {4, 7, 100}, 3);
  Array y(bf16, {4, 7, 100});
  for (std::int64_t r = 0; r < 28; ++r) {
    for (std::int64_t i = 0; i < 100; ++i) {
      y.set(r * 100 + of.place(static_cast<int>(r / 7), i), x.get(r * 100 + i));
    }
  }
  const Tensor there = view(counts.data(), {4});
  EXPECT_EQ(multiply(context, of, true, bf16, x, {}, there, f32),
            multiply(context, of, false, bf16, y, {}, there, f32));
  EXPECT_EQ(multiply(context, of, true, bf16, x, {}, {}, f32),
            multiply(context, of, false, bf16, y, {}, {}, f32));
}

TEST(OrderedGemm, WeightsComeBack) {
  const Context context = engine();
  for (const auto& [n, k, group] : shapes) {
    const Four of(n, k, static_cast<int>(group));
    const Buffer memory = context.allocate(prepared_bytes(context, bf16, of.format(true), 4, n, k));
    const PreparedWeights prepared = prepare_packed(context, bf16, of.shuffled, memory);
    for (int g = 0; g < 4; ++g) {
      Array got(f32, {n, k});
      std::vector<float> wanted(at(n * k));
      Mirror mirror(context);
      unprepare(context, prepared, g, mirror.out(got.tensor));
      mirror.fetch();
      unpack(of.shuffled[at(g)], view(wanted.data(), {n, k}));
      for (std::int64_t i = 0; i < n * k; ++i) ASSERT_EQ(got.get(i), wanted[at(i)]) << i;
    }
  }
}

// Pairs in any order: against sums in double.
TEST(OrderedGemm, IndexedRows) {
  const Context context = engine();
  const std::int64_t n = 70, k = 100, tokens = 9;
  const Four of(n, k, 32);
  const std::vector<std::int32_t> ids = {0, 2, 3, 1, 1, 0, 2, 2, 3, 0, 1, 2, 3, 3, 0, 0, 1, 2};
  const FormatSpec format = of.format(true);
  const GroupedGemmSpec gemm{.groups = 4, .n = n, .k = k, .dtype = bf16, .format = format};
  const Buffer memory = context.allocate(prepared_bytes(context, bf16, format, 4, n, k));
  const PreparedWeights prepared = prepare_packed(context, bf16, of.shuffled, memory);
  const Array x = random_array(bf16, {tokens, k}, 5);
  Array out(f32, {tokens * 2, n});
  const Buffer workspace = context.allocate(indexed_gemm_workspace_bytes(context, gemm, tokens, 2));
  Mirror mirror(context);
  indexed_gemm(context, gemm,
               {.rows = mirror.in(x.tensor),
                .ids = mirror.in(view(ids.data(), {tokens, 2})),
                .prepared = prepared},
               mirror.out(out.tensor), workspace);
  mirror.fetch();
  for (std::int64_t p = 0; p < tokens * 2; ++p) {
    const PackedMatrix& m = of.shuffled[at(ids[at(p)])];
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0, magnitude = 0;
      for (std::int64_t i = 0; i < k; ++i) {
        const double term = plain_weight(m, j, i) * static_cast<double>(x.get(p / 2 * k + i));
        sum += term;
        magnitude += std::abs(term);
      }
      // Kernels for many rows may round weights to bf16; all others lose less.
      ASSERT_NEAR(static_cast<double>(out.get(p * n + j)), sum, 0x1p-8 * magnitude)
          << "pair " << p << ", column " << j;
    }
  }
}

#if SHUNT_CUDA_BUILT
TEST(OrderedGemm, OneOrderForGateAndUpOnAGpu) {
  if (!on_gpu()) GTEST_SKIP() << "the CPU engine takes two";
  const Context context = engine();
  const Ordered gate(40, 96, 32, 1), up(40, 96, 32, 2);
  Ordered same(40, 96, 32, 3);
  same.shuffled.group_of = gate.shuffled.group_of;
  const FormatSpec format{Format::int4, 32, true};
  const Buffer memory = context.allocate(prepared_bytes(context, bf16, format, 1, 80, 96, true));
  EXPECT_TRUE(prepare_packed_paired(context, bf16, {gate.shuffled}, {same.shuffled}, memory)
                  .format.ordered);
  Status status{};
  const std::string why = error_of(
      [&] { prepare_packed_paired(context, bf16, {gate.shuffled}, {up.shuffled}, memory); },
      &status);
  EXPECT_EQ(status, Status::unsupported);
  EXPECT_NE(why.find("up[0].group_of is not that of"), std::string::npos) << why;
}

TEST(OrderedGemm, DamagedFilesAreRefusedOnAGpu) {
  if (!on_gpu()) GTEST_SKIP() << "SavedWeights.DamagedOrdersAreRefused is about the CPU engine";
  const Context context = engine();
  const TemporaryFolder folder;
  const std::string path = folder / "weights.safetensors";
  const Four of(70, 100, 32);
  const Buffer memory =
      context.allocate(prepared_bytes(context, bf16, of.format(true), 4, of.n, of.k));
  const PreparedWeights given = prepare_packed(context, bf16, of.shuffled, memory);
  save_prepared(context, given, path);
  Buffer again;
  EXPECT_EQ(load_prepared(context, path, again).format, given.format);
  const SafetensorsFile file = SafetensorsFile::open(path);
  const Tensor saved = file.get("prepared");
  const cuda_engine::FragmentLayout layout{given.format, bf16, of.n, of.k, false};
  for (const std::int32_t wrong : {-1, 100, 1 << 30}) {
    std::vector<char> bytes(saved.as<char>(), saved.as<char>() + saved.bytes());
    std::memcpy(bytes.data() + layout.group_bytes() + layout.order_at() + 4 * 17, &wrong,
                sizeof wrong);
    const std::string other = folder / "other.safetensors";
    write_safetensors(other,
                      {{"prepared", view(static_cast<const void*>(bytes.data()), DType::u8,
                                         {static_cast<std::int64_t>(bytes.size())})}},
                      file.metadata());
    Status status{};
    const std::string why = error_of([&] { load_prepared(context, other, again); }, &status);
    EXPECT_EQ(status, Status::bad_file);
    EXPECT_NE(why.find("group 1's"), std::string::npos) << why;
  }
}
#endif

}  // namespace
}  // namespace shunt::test
