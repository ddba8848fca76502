// The pass that rounds rows to fp8 in place, run thread by thread on the host.
// clang-format off
#include "cuda/warp_on_host.hpp"
#include "layer/round_row.cuh"
// clang-format on

#include <gtest/gtest.h>

#include <random>

#include "core/convert.hpp"
#include "core/quantise.hpp"
#include "layer/plan.hpp"

namespace shunt {
namespace {

// A row of `columns` numbers against fp8_scale() and to_e4m3().
void check(RowFormat kind, std::int64_t columns) {
  SCOPED_TRACE("columns " + std::to_string(columns));
  constexpr int threads = 256;
  ASSERT_TRUE(Fp8Rows::fits_in_place(kind, columns));
  const std::int64_t block = kind == RowFormat::fp8_token ? columns : 128;
  std::vector<std::uint16_t> row(static_cast<std::size_t>(columns + 8), 0x1234);
  std::mt19937 random(static_cast<unsigned>(columns));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < columns; ++i) {
    row[static_cast<std::size_t>(i)] =
        f32_to_bf16(normal(random) * static_cast<float>(1 + i / 128));
  }
  row[3] = 0x7f80;  // an infinity, which moves no scale
  for (std::int64_t i = 128; i < std::min<std::int64_t>(256, columns); ++i) {
    row[static_cast<std::size_t>(i)] = 0;
  }
  const std::vector<std::uint16_t> given = row;
  std::vector<float> shared(static_cast<std::size_t>(columns / 128 + threads / 32));
  auto* const bytes = reinterpret_cast<char*>(row.data());
  const auto load = [&](std::int64_t column, float(&x)[8]) {
    for (std::int64_t i = 0; i < 8; ++i) {
      const auto at = static_cast<std::size_t>(column + i);
      x[i] = column + i < columns ? bf16_to_f32(row[at]) : 0.0F;
    }
  };
  test::HostWarp::run_block(threads / 32, [&](int warp, int lane) {
    const std::int64_t scales_at = Fp8Rows::pitch(columns);
    if (kind == RowFormat::fp8_token) {
      cuda_engine::round_whole_row<threads>(bytes, load, columns, scales_at, shared.data(),
                                            32 * warp + lane);
    } else {
      cuda_engine::round_row<threads>(bytes, load, columns, scales_at, shared.data(),
                                      32 * warp + lane);
    }
  });
  for (std::int64_t first = 0; first < columns; first += block) {
    const std::int64_t end = std::min(first + block, columns);
    float most = 0;
    for (std::int64_t i = first; i < end; ++i) {
      const float size = std::abs(bf16_to_f32(given[static_cast<std::size_t>(i)]));
      if (std::isfinite(size)) most = std::max(most, size);
    }
    const Fp8Scale scale = fp8_scale(most, 0, false);
    float got = 0;
    std::memcpy(&got, bytes + Fp8Rows::pitch(columns) + first / block * 4, 4);
    ASSERT_EQ(got, scale.scale) << "from " << first;
    for (std::int64_t i = first; i < end; ++i) {
      const float x = bf16_to_f32(given[static_cast<std::size_t>(i)]);
      ASSERT_EQ(static_cast<std::uint8_t>(bytes[i]), to_e4m3(x * scale.factor)) << "number " << i;
    }
  }
  for (std::size_t i = 0; i < 8; ++i) {
    ASSERT_EQ(row[static_cast<std::size_t>(columns) + i], 0x1234);
  }
}

TEST(RoundRow, LeavesValuesAndThenScales) {
  for (const std::int64_t columns : {24, 100, 128, 776, 2048, 2050, 4100, 6144}) {
    check(RowFormat::fp8_block, columns);
  }
}

TEST(RoundRow, OrOneScale) {
  for (const std::int64_t columns : {10, 24, 100, 776, 2050, 4100, 14336}) {
    check(RowFormat::fp8_token, columns);
  }
}

}  // namespace
}  // namespace shunt
