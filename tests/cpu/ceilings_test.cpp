#include "cpu/ceilings.hpp"

#include <gtest/gtest.h>

#include <vector>

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

}  // namespace
}  // namespace shunt::cpu_engine
