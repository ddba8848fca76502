#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <vector>

#include "engine.hpp"
#include "gemm/cuda_layout.hpp"
#include "gemm/gemm_data.hpp"
#include "gemm/layout.hpp"
#include "shunt/gemm.hpp"

namespace shunt {
namespace {

using test::Array;
using test::random_array;

constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f16};

float rounded(float x, DType dtype) {
  if (dtype == DType::bf16) return bf16_to_f32(f32_to_bf16(x));
  if (dtype == DType::f16) return f16_to_f32(f32_to_f16(x));
  return x;
}

// unprepare, into memory of the host.
void read_back(const Context& context, const PreparedWeights& weights, int group, const Array& to) {
  test::Mirror mirror(context);
  unprepare(context, weights, group, mirror.out(to.tensor));
  mirror.fetch();
}

TEST(Prepare, RoundTripRoundsOnce) {
  const Context context = test::engine();
  for (const DType from : dtypes) {
    for (const DType to : dtypes) {
      for (const auto& [n, k] : {std::pair<int, int>{1, 1}, {65, 3}, {64, 64}, {130, 37}}) {
        const Array source = random_array(from, {3, n, k}, 5);
        const std::vector<Tensor> matrices = {source.tensor[0], source.tensor[1], source.tensor[2]};
        const Buffer memory = context.allocate(prepared_bytes(context, to, 3, n, k));
        const PreparedWeights w = prepare(context, to, matrices, memory);
        for (int g = 0; g < 3; ++g) {
          Array back(DType::f32, {n, k});
          read_back(context, w, g, back);
          for (std::int64_t i = 0; i < n * k; ++i) {
            ASSERT_EQ(back.get(i), rounded(source.get(g * n * k + i), to));
          }
        }
      }
    }
  }
}

// A checkpoint's arrangements are views: transposed, interleaved, halves of one tensor.
TEST(Prepare, AnyStrides) {
  const Context context = test::engine(1);
  const int n = 50, k = 21;
  const Array transposed = random_array(DType::f32, {k, n}, 6);
  Buffer memory = context.allocate(prepared_bytes(context, DType::f32, 1, n, k));
  Array back(DType::f32, {n, k});
  read_back(context, prepare(context, DType::f32, {transposed.tensor.transposed()}, memory), 0,
            back);
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < k; ++i) EXPECT_EQ(back.get(j * k + i), transposed.get(i * n + j));
  }

  const Array mixed = random_array(DType::bf16, {2 * n, k}, 7);  // gate 0, up 0, gate 1, ..
  Tensor gate = mixed.tensor;
  gate.shape[0] = n;
  gate.strides[0] = 2 * k;
  Tensor up = gate;
  up.data = mixed.tensor.as<char>() + 2 * k;
  memory = context.allocate(prepared_bytes(context, DType::bf16, 1, 2 * n, k, true));
  Array both(DType::f32, {2 * n, k});
  read_back(context, prepare_paired(context, DType::bf16, {gate}, {up}, memory), 0, both);
  for (int j = 0; j < n; ++j) {
    for (int i = 0; i < k; ++i) {
      EXPECT_EQ(both.get(j * k + i), mixed.get(2 * j * k + i));
      EXPECT_EQ(both.get((n + j) * k + i), mixed.get((2 * j + 1) * k + i));
    }
  }
}

TEST(Prepare, PaddingIsZeroWhateverTheMemoryHeld) {
  SHUNT_ON_CPU_ONLY();
  const Context context = cpu({.threads = 1});
  for (const DType dtype : dtypes) {
    const Array source = random_array(DType::f32, {3, 3}, 8);
    const std::size_t bytes = prepared_bytes(context, dtype, 1, 3, 3);
    const Buffer memory = context.allocate(bytes);
    std::memset(memory.data(), 0x7f, bytes);
    prepare(context, dtype, {source.tensor}, memory);
    int nonzero = 0;
    const auto elements = static_cast<std::int64_t>(bytes) / (dtype == DType::f32 ? 4 : 2);
    for (std::int64_t i = 0; i < elements; ++i) nonzero += load_f32(memory.data(), dtype, i) != 0;
    EXPECT_EQ(nonzero, 9);
  }
}

TEST(Prepare, BytesAreWhatTheLayoutSays) {
  SHUNT_ON_CPU_ONLY();
  const Context context = cpu({.threads = 1});
  EXPECT_EQ(prepared_bytes(context, DType::f32, 2, 64, 10), 2U * 64 * 10 * 4);
  EXPECT_EQ(prepared_bytes(context, DType::f16, 2, 65, 10), 2U * 128 * 10 * 2);
  EXPECT_EQ(prepared_bytes(context, DType::bf16, 2, 64, 11), 2U * 64 * 12 * 2);
  EXPECT_EQ(prepared_bytes(context, DType::bf16, 1, 2 * 33, 10, true), 2U * 64 * 10 * 2);
  EXPECT_EQ(prepared_bytes(context, DType::bf16, 0, 64, 11), 0U);
  // Qwen3-30B-A3B: no padding at all.
  EXPECT_EQ(prepared_bytes(context, DType::bf16, 128, 1536, 2048, true), 128U * 1536 * 2048 * 2);
}

// A matrix of which only a small part of a whole is meant, and one whose rows run backwards.
TEST(Prepare, SparseAndReversedViews) {
  const Context context = test::engine(1);
  const Array whole = random_array(DType::f32, {40, 300}, 9);
  Tensor part = whole.tensor;
  part.shape[0] = 20, part.shape[1] = 15;
  part.strides[0] = 600, part.strides[1] = 20;
  Tensor reversed = whole.tensor;
  reversed.shape[0] = 20, reversed.shape[1] = 15;
  reversed.data = whole.tensor.as<float>() + 19 * 300;
  reversed.strides[0] = -300;
  const Buffer memory = context.allocate(prepared_bytes(context, DType::f32, 2, 20, 15));
  const PreparedWeights w = prepare(context, DType::f32, {part, reversed}, memory);
  Array first(DType::f32, {20, 15}), second(DType::f32, {20, 15});
  read_back(context, w, 0, first);
  read_back(context, w, 1, second);
  for (int i = 0; i < 20; ++i) {
    for (int j = 0; j < 15; ++j) {
      EXPECT_EQ(first.get(i * 15 + j), whole.get(i * 600 + j * 20));
      EXPECT_EQ(second.get(i * 15 + j), whole.get((19 - i) * 300 + j));
    }
  }
}

// Weights may come from the context's own device as well.
TEST(Prepare, FromTheDevice) {
  const Context context = test::engine();
  const Array gate = random_array(DType::bf16, {3, 21, 30}, 10);
  const Array up = random_array(DType::bf16, {3, 30, 21}, 11);
  test::Mirror mirror(context);
  const Tensor gates = mirror.in(gate.tensor), ups = mirror.in(up.tensor);
  const Buffer memory = context.allocate(prepared_bytes(context, DType::bf16, 3, 42, 30, true));
  const PreparedWeights w =
      prepare_paired(context, DType::bf16, {gates[0], gates[1], gates[2]},
                     {ups[0].transposed(), ups[1].transposed(), ups[2].transposed()}, memory);
  for (int g = 0; g < 3; ++g) {
    Array back(DType::f32, {42, 30});
    read_back(context, w, g, back);
    for (int i = 0; i < 21; ++i) {
      for (int j = 0; j < 30; ++j) {
        EXPECT_EQ(back.get(i * 30 + j), gate.get(g * 630 + i * 30 + j));
        EXPECT_EQ(back.get((21 + i) * 30 + j), up.get(g * 630 + j * 21 + i));
      }
    }
  }
}

TEST(Prepare, LayoutRowsCoverTheMatrixOnce) {
  for (const bool paired : {false, true}) {
    for (const std::int64_t n : {2, 30, 64, 66, 200}) {
      const PanelLayout layout(DType::f32, n, 1, paired);
      std::vector<int> seen(static_cast<std::size_t>(n), 0);
      for (std::int64_t p = 0; p < layout.panels(); ++p) {
        for (std::int64_t c = 0; c < panel_columns; ++c) {
          if (layout.row(p, c) >= 0) ++seen[static_cast<std::size_t>(layout.row(p, c))];
        }
      }
      for (const int count : seen) EXPECT_EQ(count, 1);
    }
  }
}

// The same of the layout on a GPU, whose blocks of 8 rows take turns.
TEST(Prepare, RowLayoutCoversTheMatrixOnce) {
  for (const bool paired : {false, true}) {
    for (const std::int64_t n : {2, 14, 16, 18, 30, 200}) {
      const cuda_engine::RowLayout layout{DType::bf16, n, 5, paired};
      std::vector<int> seen(static_cast<std::size_t>(n), 0);
      for (std::int64_t at = 0; at < layout.rows(); ++at) {
        const std::int64_t row = layout.source(at);
        if (row < 0) continue;
        ++seen[static_cast<std::size_t>(row)];
        EXPECT_EQ(paired && at % 16 >= 8, paired && row >= n / 2);
      }
      for (const int count : seen) EXPECT_EQ(count, 1);
      std::set<std::int64_t> places;
      for (std::int64_t at = 0; at < layout.padded_rows(); ++at) {
        for (std::int64_t i = 0; i < layout.padded_k(); ++i) places.insert(layout.element(at, i));
      }
      EXPECT_EQ(static_cast<std::int64_t>(places.size()) * 2, layout.group_bytes());
      EXPECT_EQ((*places.rbegin() + 1) * 2, layout.group_bytes());
    }
  }
}

}  // namespace
}  // namespace shunt
