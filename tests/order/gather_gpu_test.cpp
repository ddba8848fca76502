// What only a GPU's gather has: vectors chosen by alignment, counts that stay on the device, values
// that nobody checked, graphs.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/convert.hpp"
#include "engine.hpp"
#include "order/order_case.hpp"

#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"

namespace shunt::test {
namespace {

// Memory of a context as an array.
template <class T>
struct Device {
  Context context;
  Buffer buffer;
  std::int64_t size;

  Device(const Context& c, std::int64_t n)
      : context(c), buffer(c.allocate(static_cast<std::size_t>(n) * sizeof(T))), size(n) {}
  Device(const Context& c, const std::vector<T>& values)
      : Device(c, static_cast<std::int64_t>(values.size())) {
    put(values);
  }
  void put(const std::vector<T>& values) {
    context.copy(buffer.data(), values.data(), values.size() * sizeof(T));
  }
  std::vector<T> get(std::int64_t begin, std::int64_t count) const {
    std::vector<T> values(static_cast<std::size_t>(count));
    context.copy(values.data(), static_cast<const T*>(buffer.data()) + begin,
                 values.size() * sizeof(T));
    return values;
  }
  std::vector<T> get() const { return get(0, size); }
  Tensor tensor(DType dtype, std::initializer_list<std::int64_t> shape,
                std::int64_t offset = 0) const {
    return view(static_cast<T*>(buffer.data()) + offset, dtype, shape, context.device());
  }
};

// Every alignment of pointers and widths gives the bytes that the CPU engine gives.
TEST(GatherOnGpu, AnyAlignment) {
  SHUNT_ON_GPU_ONLY();
  const Context gpu = cuda(), host = cpu({.threads = 1});
  const std::int64_t tokens = 9, slots = 3, pairs = tokens * slots;
  std::vector<std::int32_t> permutation(static_cast<std::size_t>(pairs));
  std::iota(permutation.rbegin(), permutation.rend(), 0);
  const std::int32_t count = 25;
  // The inverse of that: pairs of rows at or past the count have none that counts.
  const std::vector<std::int32_t> inverse = permutation;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (const bool scaled : {false, true}) {
    const GatherSpec spec{.slots = static_cast<int>(slots), .scale_by_weight = scaled};
    std::vector<float> weights;
    for (std::int64_t r = 0; r < pairs; ++r) weights.push_back(normal(random));
    for (const DType from : {f32, bf16, f16}) {
      for (const DType to : {f32, bf16, f16}) {
        for (const std::int64_t width : {1, 2, 6, 12, 24, 257, 264, 1032}) {
          for (const std::int64_t shift : {0, 1, 2, 4}) {
            std::vector<std::uint32_t> hidden(static_cast<std::size_t>(tokens * (width + 8) + 8));
            const auto at = [](std::vector<std::uint32_t>& memory, DType dtype, std::int64_t rows,
                               std::int64_t columns, std::int64_t offset) {
              Tensor t = view(reinterpret_cast<char*>(memory.data()) + offset * bits(dtype) / 8,
                              dtype, {rows, columns});
              t.strides[0] = columns + offset;
              return t;
            };
            const Tensor x = at(hidden, from, tokens, width, shift);
            for (std::int64_t t = 0; t < tokens; ++t) {
              for (std::int64_t h = 0; h < width; ++h) {
                store_f32(x.data, from, t * x.strides[0] + h, normal(random));
              }
            }
            const auto rows_by = [&](const Context& context, bool by_token = false) {
              std::vector<std::uint32_t> rows(static_cast<std::size_t>(pairs * (width + 8) + 8),
                                              0x4d4d4d4d);
              Mirror mirror(context);
              gather(context, spec,
                     {.hidden = mirror.in(x),
                      .permutation = mirror.in(view(permutation.data(), {pairs})),
                      .rows = mirror.in(view(&count, {1})),
                      .weights = scaled ? mirror.in(view(weights.data(), {pairs})) : Tensor{},
                      .inverse =
                          by_token ? mirror.in(view(inverse.data(), {tokens, slots})) : Tensor{}},
                     mirror.out(at(rows, to, pairs, width, shift)));
              mirror.fetch();
              return rows;
            };
            const auto want = rows_by(host);
            ASSERT_EQ(rows_by(gpu), want)
                << to_string(from) << " to " << to_string(to) << " width " << width << " offset "
                << shift << (scaled ? " scaled" : "");
            ASSERT_EQ(rows_by(gpu, true), want)
                << "with the inverse, " << to_string(from) << " to " << to_string(to) << " width "
                << width << " offset " << shift << (scaled ? " scaled" : "");
          }
        }
      }
    }
  }
}

// More vectors than threads fit on a GPU at once, of rows that share a block, fill one, or take
// several; with more than eight targets too.
TEST(GatherOnGpu, ManyRows) {
  SHUNT_ON_GPU_ONLY();
  const Context gpu = cuda(), host = cpu({.threads = 1});
  struct Sizes {
    std::int64_t tokens, width, slots;
  };
  for (const Sizes& s : {Sizes{90000, 40, 1}, Sizes{9000, 520, 3}, Sizes{3000, 1800, 2},
                         Sizes{1500, 4104, 2}, Sizes{3000, 1016, 11}}) {
    const std::int64_t pairs = s.tokens * s.slots;
    std::vector<std::int32_t> permutation(static_cast<std::size_t>(pairs)), inverse(permutation);
    std::iota(permutation.begin(), permutation.end(), 0);
    std::mt19937 random(3);
    std::shuffle(permutation.begin(), permutation.end(), random);
    for (std::size_t r = 0; r < permutation.size(); ++r) {
      inverse[static_cast<std::size_t>(permutation[r])] = static_cast<std::int32_t>(r);
    }
    const auto count = static_cast<std::int32_t>(pairs - 5);
    std::vector<std::uint16_t> hidden(static_cast<std::size_t>(s.tokens * s.width));
    for (auto& value : hidden) value = static_cast<std::uint16_t>(random() & 0xbfff);
    for (const DType to : {bf16, f32}) {
      const auto rows_by = [&](const Context& context, bool by_token) {
        std::vector<std::uint32_t> rows(static_cast<std::size_t>(pairs * s.width), 0x4d4d4d4d);
        Mirror mirror(context);
        gather(
            context, {.slots = static_cast<int>(s.slots)},
            {.hidden = mirror.in(view(hidden.data(), bf16, {s.tokens, s.width})),
             .permutation = mirror.in(view(permutation.data(), {pairs})),
             .rows = mirror.in(view(&count, {1})),
             .inverse = by_token ? mirror.in(view(inverse.data(), {s.tokens, s.slots})) : Tensor{}},
            mirror.out(view(rows.data(), to, {pairs, s.width})));
        mirror.fetch();
        return rows;
      };
      const auto want = rows_by(host, false);
      EXPECT_TRUE(rows_by(gpu, false) == want) << s.width << " " << to_string(to);
      EXPECT_TRUE(rows_by(gpu, true) == want) << s.width << " by token " << to_string(to);
    }
  }
}

// The host cannot look at them: rows of illegal numbers are left alone, counts are clamped.
TEST(GatherOnGpu, IllegalValuesAreSkipped) {
  SHUNT_ON_GPU_ONLY();
  const Context gpu = cuda();
  const std::int64_t width = 64;
  std::vector<float> hidden(static_cast<std::size_t>(2 * width));
  std::iota(hidden.begin(), hidden.end(), 1.0F);
  const std::vector<std::int32_t> permutation = {-1, 3, INT32_MAX, 4, 0, INT32_MIN};
  const Device<float> x(gpu, hidden);
  const Device<std::int32_t> p(gpu, permutation);
  for (const std::int32_t count : {INT32_MIN, -1, 0, 2, 6, 7, INT32_MAX}) {
    const Device<std::int32_t> c(gpu, std::vector<std::int32_t>{count});
    const Device<float> rows(gpu, std::vector<float>(static_cast<std::size_t>(6 * width), 77.0F));
    gather(gpu, {.slots = 3},
           {.hidden = x.tensor(f32, {2, width}),
            .permutation = p.tensor(i32, {6}),
            .rows = c.tensor(i32, {1})},
           rows.tensor(f32, {6, width}));
    gpu.synchronize();
    const std::vector<float> got = rows.get();
    for (std::int64_t r = 0; r < 6; ++r) {
      const std::int32_t pair = permutation[static_cast<std::size_t>(r)];
      const bool written = r < count && pair >= 0 && pair < 6;
      for (std::int64_t h = 0; h < width; ++h) {
        const float want = written ? hidden[static_cast<std::size_t>(pair / 3 * width + h)] : 77.0F;
        ASSERT_EQ(got[static_cast<std::size_t>(r * width + h)], want) << count << " row " << r;
      }
    }
  }
}

TEST(GatherOnGpu, IllegalInversesAreSkipped) {
  SHUNT_ON_GPU_ONLY();
  const Context gpu = cuda();
  const std::int64_t width = 40;
  std::vector<float> hidden(static_cast<std::size_t>(2 * width), 1.0F);
  const Device<float> x(gpu, hidden);
  const Device<std::int32_t> p(gpu, std::vector<std::int32_t>(6, 0));
  const Device<std::int32_t> inverse(gpu,
                                     std::vector<std::int32_t>{-1, 6, 2, INT32_MIN, INT32_MAX, 4});
  for (const std::int32_t count : {INT32_MIN, -1, 0, 3, 6, 7, INT32_MAX}) {
    const Device<std::int32_t> c(gpu, std::vector<std::int32_t>{count});
    for (const bool quantised : {false, true}) {
      const Device<std::uint8_t> rows(gpu, std::vector<std::uint8_t>(6 * width * 4, 0x11));
      const Device<float> scales(gpu, std::vector<float>(6, 77.0F));
      gather(gpu, {.slots = 3, .quantise = quantised ? Quantise::row : Quantise::none},
             {.hidden = x.tensor(f32, {2, width}),
              .permutation = p.tensor(i32, {6}),
              .rows = c.tensor(i32, {1}),
              .inverse = inverse.tensor(i32, {2, 3})},
             rows.tensor(quantised ? DType::f8_e4m3 : f32, {6, width}),
             quantised ? scales.tensor(f32, {6}) : Tensor{});
      gpu.synchronize();
      const auto got = rows.get();
      for (std::int64_t r = 0; r < 6; ++r) {
        const bool written = r < count && (r == 2 || r == 4);
        const std::int64_t bytes = quantised ? width : 4 * width;
        for (std::int64_t i = 0; i < bytes; ++i) {
          ASSERT_EQ(got[static_cast<std::size_t>(r * bytes + i)] != 0x11, written)
              << count << " row " << r << " byte " << i;
        }
        if (quantised) {
          ASSERT_EQ(scales.get()[static_cast<std::size_t>(r)] != 77.0F, written);
        }
      }
    }
  }
}

// 2.3e9 elements, past what 32 bits number.
TEST(GatherOnGpu, MoreThan31BitsOfElements) {
  SHUNT_ON_GPU_ONLY();
  const Context gpu = cuda();
  const std::int64_t tokens = 40000, slots = 8, width = 7168, pairs = tokens * slots;
  // A token's row holds its number, in two columns of 8 bits.
  std::vector<std::uint16_t> numbered(static_cast<std::size_t>(tokens * width));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t h = 0; h < width; ++h) {
      numbered[static_cast<std::size_t>(t * width + h)] =
          static_cast<std::uint16_t>(t * 31 + h * 7);
    }
  }
  const Device<std::uint16_t> hidden(gpu, numbered);
  const Device<std::uint16_t> rows(gpu, pairs * width);
  // Row r is pair (r * 12345 + 678) mod pairs: 12345 and pairs share only the factor 5, so rows
  // repeat, which is legal.
  std::vector<std::int32_t> permutation(static_cast<std::size_t>(pairs));
  for (std::int64_t r = 0; r < pairs; ++r) {
    permutation[static_cast<std::size_t>(r)] = static_cast<std::int32_t>((r * 12345 + 678) % pairs);
  }
  const Device<std::int32_t> p(gpu, permutation);
  const Device<std::int32_t> count(gpu,
                                   std::vector<std::int32_t>{static_cast<std::int32_t>(pairs)});
  gather(gpu, {.slots = static_cast<int>(slots)},
         {.hidden = hidden.tensor(bf16, {tokens, width}),
          .permutation = p.tensor(i32, {pairs}),
          .rows = count.tensor(i32, {1})},
         rows.tensor(bf16, {pairs, width}));
  gpu.synchronize();
  for (std::int64_t r = 0; r < pairs; r += r < pairs - 100 ? 3989 : 1) {
    const std::int64_t token = permutation[static_cast<std::size_t>(r)] / slots;
    const auto got = rows.get(r * width, width);
    ASSERT_TRUE(std::equal(got.begin(), got.end(), numbered.begin() + token * width)) << r;
  }
}

// One graph, replayed while the count and the permutation change; the same bits every time.
TEST(GatherOnGpu, GraphFollowsTheDevice) {
  SHUNT_ON_GPU_ONLY();
  const Stream stream;
  for (const bool dependent : {false, true}) {
    const Context gpu = cuda({.stream = stream.get(), .dependent_launch = dependent});
    const std::int64_t tokens = 50, slots = 4, width = 520, pairs = tokens * slots;
    std::mt19937 random(3);
    std::vector<std::uint16_t> values(static_cast<std::size_t>(tokens * width));
    for (auto& value : values) value = static_cast<std::uint16_t>(random() & 0x3fff);
    const Device<std::uint16_t> hidden(gpu, values), middle(gpu, pairs * width),
        rows(gpu, pairs * width);
    Device<std::int32_t> p(gpu, pairs), count(gpu, 1), same(gpu, pairs);
    std::vector<std::int32_t> identity(static_cast<std::size_t>(pairs));
    std::iota(identity.begin(), identity.end(), 0);
    same.put(identity);
    // The second gather reads what the first one wrote.
    const Graph graph(stream, [&] {
      gather(gpu, {.slots = static_cast<int>(slots)},
             {.hidden = hidden.tensor(bf16, {tokens, width}),
              .permutation = p.tensor(i32, {pairs}),
              .rows = count.tensor(i32, {1})},
             middle.tensor(bf16, {pairs, width}));
      gather(gpu, {.slots = 1},
             {.hidden = middle.tensor(bf16, {pairs, width}),
              .permutation = same.tensor(i32, {pairs}),
              .rows = count.tensor(i32, {1})},
             rows.tensor(bf16, {pairs, width}));
    });
    std::vector<std::uint16_t> want(static_cast<std::size_t>(pairs * width));
    for (const std::int32_t n : {0, 1, 200, 77, 200, 3}) {
      std::vector<std::int32_t> permutation = identity;
      std::shuffle(permutation.begin(), permutation.end(), random);
      p.put(permutation);
      count.put({n});
      for (std::int32_t r = 0; r < n; ++r) {
        const auto token = permutation[static_cast<std::size_t>(r)] / slots;
        std::copy_n(values.begin() + token * width, width, want.begin() + r * width);
      }
      for (int again = 0; again < 2; ++again) {
        graph.replay();
        ASSERT_EQ(rows.get(), want) << n;
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
#endif
