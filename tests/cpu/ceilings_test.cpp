#include "cpu/ceilings.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "sanitizer.hpp"

namespace shunt::cpu_engine {
namespace {

TEST(Ceilings, ArePositiveWhereTheCpuHasThem) {
  for (const int threads : {1, 2}) {
    Pool pool(threads);
    EXPECT_GT(f32_fma_per_second(pool, 1e-3), 1e8);
    EXPECT_EQ(bf16_dot_per_second(pool, 1e-3) > 0, supported(Isa::avx512_bf16));
    EXPECT_EQ(bf16_tiles_per_second(pool, 1e-3) > 0, supported(Isa::amx_bf16));
    EXPECT_EQ(int8_dot_per_second(pool, 1e-3) > 0,
              supported(Isa::avx512) && features().avx512_vnni);
    EXPECT_EQ(fp16_fma_per_second(pool, 1e-3) > 0,
              supported(Isa::avx512) && features().avx512_fp16);
    const std::vector<char> memory(1 << 20, 1);
    EXPECT_GT(read_bytes_per_second(pool, memory.data(), memory.size()), 1e6);
  }
}

// Seconds that a call takes, the least of some.
template <class Call>
double least_seconds(const Call& call) {
  double least = HUGE_VAL;
  for (int n = 0; n < 7; ++n) {
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    least = std::min(least, took.count());
  }
  return least;
}

// Bandwidth beside a plain loop that adds words up, and operations beside each other: an operation
// counted twice, or a factor of ten, would show.
TEST(Ceilings, AreOfTheRightSize) {
  if (SHUNT_SANITIZED) GTEST_SKIP() << "a sanitizer slows the plain loop alone";
  Pool pool(1);
  std::vector<std::uint64_t> memory(std::size_t{64} << 17, 1);  // 64 MB
  const double bytes = static_cast<double>(memory.size() * sizeof(memory[0]));
  volatile std::uint64_t sink = 0;
  const double plain = bytes / least_seconds([&] {
                         sink = std::accumulate(memory.begin(), memory.end(), std::uint64_t{0});
                       });
  double read = 0;
  for (int n = 0; n < 7; ++n) {
    read = std::max(read, read_bytes_per_second(pool, reinterpret_cast<const char*>(memory.data()),
                                                memory.size() * 8));
  }
  EXPECT_GT(read, plain / 2);
  EXPECT_LT(read, plain * 8);  // which a build without optimisation reads slowly

  const double fma = f32_fma_per_second(pool, 1e-2);
  EXPECT_LT(fma, 2.0 * 2 * 16 * 8e9);  // two units of 512 bits at 8 GHz
  if (const double dot = bf16_dot_per_second(pool, 1e-2); dot > 0) {
    EXPECT_GT(dot, fma * 0.3);
    EXPECT_LT(dot, fma * 5);
  }
  if (const double dot = int8_dot_per_second(pool, 1e-2); dot > 0) {
    EXPECT_GT(dot, fma * 0.5);
    EXPECT_LT(dot, fma * 10);
  }
}

}  // namespace
}  // namespace shunt::cpu_engine
