// What only a GPU's combine has: the CPU engine's bits, values that nobody checked, graphs.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "combine/combine_case.hpp"

#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"

namespace shunt::test {
namespace {

// The same numbers, `gap` elements between rows.
Matrix with_gap(const Matrix& from, std::int64_t gap) {
  Matrix made(from.dtype, from.rows, from.width, gap);
  for (std::int64_t r = 0; r < from.rows; ++r) {
    for (std::int64_t h = 0; h < from.width; ++h) made.set(r, h, from.at(r, h));
  }
  return made;
}

bool fma_on_host() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

// Every width, and so every vector; twice, so that no bit depends on the run.
TEST(CombineOnGpu, HasTheBitsOfTheCpu) {
  SHUNT_ON_GPU_ONLY();
  if (!fma_on_host()) GTEST_SKIP() << "this CPU has no FMA";
  const Context gpu = cuda();
  for (const DType dtype : {f32, bf16, f16}) {
    for (const auto& [identity_from, identity_until] : {std::pair{-1, 0}, {8, 0}, {8, 10}}) {
      for (const std::int64_t width : {1, 2, 8, 36, 63, 520, 2880, 7168}) {
        for (const int slots : {1, 3, 7, 8, 11, 12, 25}) {
          for (const bool joined : {false, true}) {
            const CombineCase c = make_case({.identity_from = identity_from,
                                             .identity_until = identity_until,
                                             .shared_scale = joined ? 0.75F : 1.0F},
                                            {.tokens = 21,
                                             .width = width,
                                             .slots = slots,
                                             .dtype = dtype,
                                             .shared = joined,
                                             .residual = joined});
            const Matrix there = c.on(gpu);
            ASSERT_EQ(there, c.on(cpu({.threads = 1})))
                << fmt::format("{} S{} H{} {}", to_string(dtype), slots, width, joined);
            ASSERT_EQ(there, c.on(gpu));
          }
        }
      }
    }
  }
}

// Dense rows, so that the widest vectors run, and many tokens to a block and blocks to a token.
TEST(CombineOnGpu, HasTheBitsOfTheCpuWhereRowsAreAligned) {
  SHUNT_ON_GPU_ONLY();
  if (!fma_on_host()) GTEST_SKIP() << "this CPU has no FMA";
  const Context gpu = cuda();
  std::mt19937 random(11);
  for (const DType dtype : {f32, bf16, f16}) {
    for (const std::int64_t width : {8, 64, 256, 2048, 2880, 7168}) {
      for (const std::int64_t tokens : {1, 5, 300}) {
        CombineCase c = make_case(
            {}, {.tokens = tokens, .width = width, .slots = 8, .dtype = dtype, .shared = true});
        for (Matrix* matrix : {&c.rows, &c.shared}) *matrix = with_gap(*matrix, 0);
        for (const bool shared : {false, true}) {
          CombineInputs in = c.inputs();
          if (!shared) in.shared = {};
          Matrix there(dtype, tokens, width, 0), here(dtype, tokens, width, 0);
          c.call(gpu, in, there.tensor());
          c.call(cpu({.threads = 1}), in, here.tensor());
          ASSERT_EQ(there, here) << to_string(dtype) << " T" << tokens << " H" << width;
        }
      }
    }
  }
}

// One or two rows a token, of so many tokens that a thread adds up several: rows that are missing
// or illegal among them, tokens that are not valid, and the last thread's that are not there.
TEST(CombineOnGpu, FewRowsOfManyTokensHaveTheBitsOfTheCpu) {
  SHUNT_ON_GPU_ONLY();
  if (!fma_on_host()) GTEST_SKIP() << "this CPU has no FMA";
  const Stream stream;
  for (const bool dependent : {false, true}) {
    const Context gpu = cuda({.stream = stream.get(), .dependent_launch = dependent});
    for (const DType dtype : {bf16, f16, f32}) {
      for (const int slots : {1, 2}) {
        for (const std::int64_t tokens : {300, 5003}) {
          for (const std::int64_t width : {64, 2880}) {
            for (const bool weighted : {false, true}) {
              if (tokens > 1000 && width > 1000 && dtype != bf16) continue;
              CombineCase c =
                  make_case({.weighted = weighted},
                            {.tokens = tokens, .width = width, .slots = slots, .dtype = dtype});
              c.rows = with_gap(c.rows, 0);
              c.valid = {static_cast<std::int32_t>(tokens - 13)};
              CombineCase there = c;
              for (std::size_t p = 0; p < c.inverse.size(); p += 5) {
                c.inverse[p] = -1;
                const auto past = static_cast<std::int32_t>(c.rows.rows);
                const std::int32_t none[] = {-1, -2, past, INT32_MAX};
                there.inverse[p] = none[p / 5 % 4];
              }
              Matrix want(dtype, tokens, width, 0), got(dtype, tokens, width, 0);
              c.call(cpu({.threads = 1}), c.inputs(), want.tensor());
              there.call(gpu, there.inputs(), got.tensor());
              ASSERT_EQ(got, want) << fmt::format("{} T{} S{} H{} weighted {}", to_string(dtype),
                                                  tokens, slots, width, weighted);
            }
          }
        }
      }
    }
  }
}

// Enough rows for persistent blocks, with everything that may join: of 11 and of 32 terms, spans of
// one width and of two, experts that compute nothing, tokens that are not valid, illegal rows, and
// a sum that goes over the residual.
TEST(CombineOnGpu, ManyRowsHaveTheBitsOfTheCpu) {
  SHUNT_ON_GPU_ONLY();
  if (!fma_on_host()) GTEST_SKIP() << "this CPU has no FMA";
  const Stream stream;
  for (const bool dependent : {false, true}) {
    const Context gpu = cuda({.stream = stream.get(), .dependent_launch = dependent});
    for (const DType dtype : {bf16, f16, f32}) {
      for (const int slots : {9, 30}) {
        const std::int64_t width = slots == 9 ? 2120 : 512, tokens = slots == 9 ? 460 : 580;
        CombineCase c = make_case({.identity_from = 8, .shared_scale = 0.75F}, {.tokens = tokens,
                                                                                .width = width,
                                                                                .slots = slots,
                                                                                .dtype = dtype,
                                                                                .shared = true,
                                                                                .residual = true});
        for (Matrix* matrix : {&c.rows, &c.hidden, &c.shared, &c.residual}) {
          *matrix = with_gap(*matrix, matrix == &c.shared ? 8 : 0);
        }
        c.valid = {static_cast<std::int32_t>(tokens - 13)};
        for (const bool in_place : {false, true}) {
          CombineCase here = c, there = c;
          Matrix want(dtype, tokens, width, 0), got = want;
          here.call(cpu({.threads = 1}), here.inputs(),
                    in_place ? here.residual.tensor() : want.tensor());
          for (std::size_t p = 0; p < there.inverse.size(); ++p) {
            // No row either way; -2 and less are illegal.
            if (there.inverse[p] < 0) there.inverse[p] = -1 - static_cast<std::int32_t>(p % 3);
          }
          there.call(gpu, there.inputs(), in_place ? there.residual.tensor() : got.tensor());
          const bool same = in_place ? there.residual == here.residual : got == want;
          ASSERT_TRUE(same) << fmt::format("{} S{} in place {} dependent {}", to_string(dtype),
                                           slots, in_place, dependent);
        }
      }
    }
  }
}

// The host cannot look at them: what is no row adds nothing.
TEST(CombineOnGpu, IllegalInversesAreSkipped) {
  SHUNT_ON_GPU_ONLY();
  CombineCase c = make_case({}, {.tokens = 40, .width = 72, .slots = 4, .shared = true});
  CombineCase legal = c;
  const std::int32_t illegal[] = {-2, INT32_MIN, INT32_MAX, static_cast<std::int32_t>(c.rows.rows)};
  for (std::size_t p = 0; p < c.inverse.size(); p += 3) {
    c.inverse[p] = illegal[p / 3 % 4];
    legal.inverse[p] = -1;
  }
  EXPECT_EQ(c.on(cuda()), legal.on(cuda()));
}

// One graph over changing weights, rows and number of valid tokens; out is the residual itself, and
// the second call reads what the first one wrote.
TEST(CombineOnGpu, GraphFollowsTheDevice) {
  SHUNT_ON_GPU_ONLY();
  const Stream stream;
  for (const bool dependent : {false, true}) {
    const Context gpu = cuda({.stream = stream.get(), .dependent_launch = dependent});
    CombineCase c = make_case(
        {.shared_gate = true},
        {.tokens = 60, .width = 260, .slots = 6, .dtype = bf16, .shared = true, .residual = true});
    c.valid = {60};
    Matrix y(bf16, 60, 260);
    Mirror mirror(gpu);
    const CombineInputs in = c.inputs();
    const CombineInputs there = {.rows = mirror.in(in.rows),
                                 .inverse = mirror.in(in.inverse),
                                 .weights = mirror.in(in.weights),
                                 .shared = mirror.in(in.shared),
                                 .shared_gate = mirror.in(in.shared_gate),
                                 .residual = mirror.in(in.residual),
                                 .valid_tokens = mirror.in(in.valid_tokens)};
    const Tensor out = mirror.out(y.tensor());
    CombineInputs second = there;
    second.residual = out;
    const Graph graph(stream, [&] {
      combine(gpu, c.spec, there, out);
      combine(gpu, c.spec, second, out);
    });
    std::mt19937 random(5);
    for (const std::int32_t valid : {60, 0, 17, 60, 99, 1}) {
      c.valid[0] = valid;
      std::shuffle(c.inverse.begin(), c.inverse.end(), random);
      for (float& weight : c.weights) weight = -weight;
      gpu.copy(there.valid_tokens.data, c.valid.data(), 4);
      gpu.copy(there.inverse.data, c.inverse.data(), 4 * c.inverse.size());
      gpu.copy(there.weights.data, c.weights.data(), 4 * c.weights.size());
      // The same two calls, outside the graph.
      CombineCase next = c;
      next.residual = c.on(cuda());
      const Matrix want = next.on(cuda());
      for (int again = 0; again < 2; ++again) {
        graph.replay();
        mirror.fetch();
        ASSERT_EQ(y, want) << valid;
      }
    }
  }
}

}  // namespace
}  // namespace shunt::test
#endif
