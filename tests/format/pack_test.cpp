#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>

#include "core/convert.hpp"
#include "cpu/features.hpp"
#include "format/pairs.hpp"
#include "format/plain.hpp"
#include "format/rules.hpp"

namespace shunt {
namespace {

struct Size {
  std::int64_t n, k;
};
constexpr Size sizes[] = {{1, 1},   {3, 2},    {5, 7},     {2, 16},   {7, 17},    {16, 31},
                          {4, 32},  {9, 33},   {64, 48},   {130, 40}, {129, 130}, {33, 257},
                          {1, 999}, {257, 20}, {128, 128}, {0, 16},   {16, 0}};

std::vector<FormatSpec> formats(const std::function<bool(Format)>& with) {
  std::vector<FormatSpec> list = known_formats();
  list.push_back({Format::int4, 16});
  list.push_back({Format::int4, 128});
  std::erase_if(list, [&](const FormatSpec& spec) { return !with(spec.format); });
  return list;
}
std::string name_of(const testing::TestParamInfo<FormatSpec>& info) {
  std::string name = to_string(info.param);
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

class EveryFormat : public testing::TestWithParam<FormatSpec> {};
INSTANTIATE_TEST_SUITE_P(All, EveryFormat, testing::ValuesIn(formats([](Format) { return true; })),
                         name_of);

// dense3's codes are chosen for a group, not value by value.
class NearestFormat : public EveryFormat {};
INSTANTIATE_TEST_SUITE_P(All, NearestFormat,
                         testing::ValuesIn(formats([](Format f) { return f != Format::dense3; })),
                         name_of);

// int4's largest code is -8, of which no second scale can be told.
class StableFormat : public EveryFormat {};
INSTANTIATE_TEST_SUITE_P(All, StableFormat, testing::ValuesIn(formats([](Format f) {
                           return f != Format::dense3 && f != Format::int4;
                         })),
                         name_of);

TEST_P(EveryFormat, UnpacksWhatThePlainDecoderReads) {
  for (const auto [n, k] : sizes) {
    SCOPED_TRACE(testing::Message() << n << " x " << k);
    const Packed p = Packed::of(GetParam(), normal_values(n * k, 1), n, k);
    check_packed("p", p.packed, Device{});
    EXPECT_LE(p.packed.bytes(), packed_bytes(GetParam(), n, k));
    const std::vector<float> values = p.values();
    std::vector<std::uint16_t> halves(values.size());
    // A transposed f16.
    Tensor across = view(halves.data(), DType::f16, {k, n}).transposed();
    unpack(p.packed, across);
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t j = 0; j < k; ++j) {
        const double w = plain_weight(p.packed, i, j);
        const float got = values[static_cast<std::size_t>(i * k + j)];
        ASSERT_EQ(got, static_cast<float>(w)) << i << " " << j;
        const auto half = halves[static_cast<std::size_t>(j * n + i)];
        ASSERT_NEAR(static_cast<double>(f16_to_f32(half)), w, std::fabs(w) * 0x1p-11 + 0x1p-25);
      }
    }
  }
}

// Every value is as near as its scale lets it be: no other code of the same scale is nearer.
TEST_P(NearestFormat, RoundsToNearest) {
  const FormatSpec spec = GetParam();
  const std::int64_t n = 37, k = 141;
  const Packed p = Packed::of(spec, normal_values(n * k, 2), n, k);
  const std::vector<float> values = p.values();
  PackedMatrix other = p.packed;
  const bool nibbles = p.packed.values.dtype == DType::u8;
  int compared = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      const auto at = static_cast<std::size_t>(i * k + j);
      const double x = static_cast<double>(p.matrix[at]);
      const double error = std::fabs(plain_weight(p.packed, i, j) - x);
      const std::int64_t row_bytes = p.packed.values.shape[1];
      const bool sparse = spec.format == Format::sparse_nvfp4;
      if (sparse && values[at] == 0) continue;
      auto* const cell = other.values.as<std::uint8_t>() + i * row_bytes +
                         (sparse    ? j / 4
                          : nibbles ? j / 2
                                    : j);
      const std::uint8_t old = *cell;
      for (int code = 0; code < 256; ++code) {
        *cell = static_cast<std::uint8_t>(code);
        const double there = std::fabs(plain_weight(other, i, j) - x);
        const bool saturated = spec.format == Format::int8 && code == 128;  // -128 is not used
        if (!std::isnan(there) && !saturated) {
          ASSERT_LE(error, there) << i << " " << j << " " << code;
        }
        ++compared;
      }
      *cell = old;
    }
  }
  EXPECT_GT(compared, 1000);
}

// What was packed once packs to the same bytes again, where scales are found again: for nvfp4 under
// the same global scale.
TEST_P(StableFormat, PacksAgainToTheSame) {
  const FormatSpec spec = GetParam();
  for (const auto [n, k] : sizes) {
    const Packed first = Packed::of(spec, normal_values(n * k, 3), n, k);
    const bool global = spec.format == Format::nvfp4 || spec.format == Format::sparse_nvfp4;
    const float amax = !global || first.matrix.empty()
                           ? 0
                           : std::fabs(*std::max_element(
                                 first.matrix.begin(), first.matrix.end(),
                                 [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
    const Packed again = Packed::of(spec, first.values(), n, k, amax);
    EXPECT_EQ(first.values(), again.values()) << n << " x " << k;
    if (first.packed.scales.elements() > 0) {
      EXPECT_EQ(std::memcmp(first.packed.scales.data, again.packed.scales.data,
                            static_cast<std::size_t>(first.packed.scales.bytes())),
                0)
          << n << " x " << k;
    }
  }
}

// The squared error over the power of 256 x 1024 weights.
double relative_error(const FormatSpec& spec, const std::vector<float>& weights) {
  const std::vector<float> got = Packed::of(spec, weights, 256, 1024).values();
  double error = 0, power = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const auto x = static_cast<double>(weights[i]);
    error += (static_cast<double>(got[i]) - x) * (static_cast<double>(got[i]) - x);
    power += x * x;
  }
  return error / power;
}

// On normal weights and on heavy tails: the figures of docs/formats.md, which a change of rule
// would move.
TEST_P(EveryFormat, HasItsError) {
  const FormatSpec spec = GetParam();
  struct Error {
    double normal, student;
  };
  const auto documented = [&]() -> Error {
    switch (spec.format) {
      case Format::fp8_tensor:
      case Format::fp8_channel:
      case Format::fp8_block:
        return {0.0007, 0.0007};
      case Format::mxfp8:
        return {0.00086, 0.0010};
      case Format::nvfp4:
        return {0.0090, 0.0085};
      case Format::mxfp4:
        return {0.0132, 0.0159};
      case Format::int8:
        return {0.00006, 0.00023};
      case Format::int4:
        return spec.group == 16   ? Error{0.0074, 0.0105}
               : spec.group == 32 ? Error{0.0090, 0.0143}
                                  : Error{0.0123, 0.0265};
      case Format::sparse_nvfp4:
        return {0.137, 0.100};
      case Format::dense3:
        return {0.0224, 0.0238};
      default:
        return {};
    }
  }();
  std::mt19937 random(9);
  std::student_t_distribution<float> student(5);
  constexpr std::int64_t count = std::int64_t{256} * 1024;
  std::vector<float> heavy(count);
  for (float& x : heavy) x = student(random);
  const double normal = relative_error(spec, normal_values(count, 4));
  const double tails = relative_error(spec, heavy);
  EXPECT_NEAR(normal, documented.normal, 0.04 * documented.normal);
  EXPECT_NEAR(tails, documented.student, 0.04 * documented.student);
}

TEST_P(EveryFormat, ZerosTinyAndHugeValues) {
  const FormatSpec spec = GetParam();
  const std::int64_t n = 2, k = 128;
  std::vector<float> values(static_cast<std::size_t>(n * k), 0.0F);
  for (const float x : Packed::of(spec, values, n, k).values()) EXPECT_EQ(x, 0.0F);
  for (const float magnitude :
       {std::numeric_limits<float>::denorm_min(), 1e-40F, 1e-30F, 1e30F, 3e38F}) {
    std::fill(values.begin(), values.end(), 0.0F);
    values[5] = magnitude;
    values[static_cast<std::size_t>(k + 70)] = -magnitude;
    const Packed p = Packed::of(spec, values, n, k);
    const std::vector<float> got = p.values();
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(std::isfinite(got[i])) << i << " of " << magnitude;
      if (spec.format == Format::dense3) continue;  // has no zero beside a weight
      if (i != 5 && i != static_cast<std::size_t>(k + 70)) {
        EXPECT_EQ(got[i], 0.0F) << i;
      } else if (magnitude > 1e-35F && spec.format != Format::mxfp4 &&
                 spec.format != Format::mxfp8) {
        EXPECT_NEAR(got[i] / values[i], 1, 0.13) << i << " of " << magnitude;
      }
    }
  }
}

// No scale is rounded up, and no code taken, so that a weight were infinite.
TEST_P(EveryFormat, NumbersNearTheLargestF32) {
  const FormatSpec spec = GetParam();
  // Of the largest magnitude: half of the widest step between codes, beside how far the scale is
  // rounded; or what saturates under a power of two.
  const double bound = [&] {
    switch (spec.format) {
      case Format::fp8_tensor:
      case Format::fp8_channel:
      case Format::fp8_block:
        return 16 / 448.0;
      case Format::mxfp8:
        return 1 - 448 / 512.0;
      case Format::nvfp4:
      case Format::sparse_nvfp4:  // of what it keeps
        return 1 / 6.0 * (1 + 0x1p-4);
      case Format::mxfp4:
        return 1 - 6 / 8.0;
      case Format::int8:
        return 0.5 / 127;
      case Format::int4:
        return 1 - 7 / 7.5 * (1 - 0x1p-8);
      default:
        return 1.0;  // dense3's codes are chosen for a group: below
    }
  }();
  constexpr float most = std::numeric_limits<float>::max();
  std::vector<float> magnitudes = {most, std::nextafterf(most, 0), most / 2};
  for (int i = 1; i < 40; ++i) magnitudes.push_back(most * (1 - 0.004F * static_cast<float>(i)));
  constexpr std::int64_t k = 66;
  for (const float amax : magnitudes) {
    std::vector<float> values(2 * k);
    for (std::size_t i = 0; i < values.size(); ++i) {
      constexpr float parts[] = {1, -1, 0.5F, 1e-6F, 1, -0.5F, 0.9F};
      values[i] = i < k ? amax * parts[i % std::size(parts)] : 1e-30F * parts[i % 3];
    }
    const std::vector<float> got = Packed::of(spec, values, 2, k).values();
    double squares = 0, power = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[i])) << values[i] << " of " << amax;
      const auto x = static_cast<double>(values[i]);
      const double error = std::fabs(static_cast<double>(got[i]) - x);
      squares += error * error;
      power += x * x;
      if (spec.format == Format::sparse_nvfp4 && got[i] == 0) continue;
      EXPECT_LE(error, (bound + 1e-7) * static_cast<double>(amax)) << x << " of " << amax;
    }
    if (spec.format == Format::dense3) {  // of normal weights in the mean; no bound is derived
      EXPECT_LE(squares, 0.0224 * power) << amax;
    }
  }
}

TEST_P(EveryFormat, TakesBf16AndStridesAndAnyThreads) {
  // Large enough for threads of its own.
  const std::int64_t n = 600, k = 1100;
  std::vector<float> values = normal_values(n * k, 5);
  for (float& x : values) x = bf16_to_f32(f32_to_bf16(x));
  const Packed p = Packed::of(GetParam(), values, n, k);
  std::vector<std::uint16_t> across(values.size());
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      across[static_cast<std::size_t>(j * n + i)] =
          f32_to_bf16(values[static_cast<std::size_t>(i * k + j)]);
    }
  }
  std::vector<std::uint64_t> memory(packed_bytes(GetParam(), n, k) / 8 + 8);
  const auto at = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
  const PackedMatrix other = pack(GetParam(), view(across.data(), DType::bf16, {k, n}).transposed(),
                                  {reinterpret_cast<void*>(at), packed_bytes(GetParam(), n, k)});
  EXPECT_EQ(other.global_scale, p.packed.global_scale);
  EXPECT_EQ(std::memcmp(other.values.data, p.packed.values.data,
                        static_cast<std::size_t>(other.values.bytes())),
            0);
  // A row alone has the same bytes, where no scale reaches over rows.
  const Format f = GetParam().format;
  if (f == Format::fp8_block) return;
  const float amax = std::fabs(*std::max_element(
      values.begin(), values.end(), [](float a, float b) { return std::fabs(a) < std::fabs(b); }));
  const bool global = f == Format::nvfp4 || f == Format::sparse_nvfp4 || f == Format::fp8_tensor ||
                      f == Format::dense3;
  const std::int64_t row = 431;
  const Packed one = Packed::of(
      GetParam(), std::vector<float>(values.begin() + row * k, values.begin() + (row + 1) * k), 1,
      k, global ? amax : 0);
  const std::int64_t bytes = p.packed.values.bytes() / n;
  EXPECT_EQ(std::memcmp(one.packed.values.data, p.packed.values.as<char>() + row * bytes,
                        static_cast<std::size_t>(bytes)),
            0);
}

#if defined(__x86_64__)
// Who packs may flush denormals, and whoever helps him does not.
TEST_P(EveryFormat, BytesDoNotDependOnHowTheCallerFlushesSmallNumbers) {
  const std::int64_t n = 512, k = 1024;
  const std::vector<float> values = normal_values(n * k, 7, 1e-39F);
  const auto back = [&](bool flushing) {
    const unsigned before = __builtin_ia32_stmxcsr();
    if (flushing) __builtin_ia32_ldmxcsr(before | 0x8040);
    std::vector<float> result = Packed::of(GetParam(), values, n, k).values();
    __builtin_ia32_ldmxcsr(before);
    return result;
  };
  const std::vector<float> want = back(false), got = back(true);
  EXPECT_EQ(std::memcmp(got.data(), want.data(), 4 * want.size()), 0);
}
#endif

// Every byte that a checkpoint may hold decodes as the plain decoder says, NaN codes too.
TEST_P(EveryFormat, DecodesEveryByte) {
  const std::int64_t n = 256, k = 256;
  Packed p = Packed::of(GetParam(), normal_values(n * k, 6), n, k);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t row = p.packed.values.shape[1];
    for (std::int64_t j = 0; j < row; ++j) {
      p.packed.values.as<std::uint8_t>()[i * row + j] = static_cast<std::uint8_t>(i + 3 * j);
    }
  }
  if (p.packed.scales.dtype == DType::f8_e4m3 || p.packed.scales.dtype == DType::f8_e8m0) {
    for (std::int64_t i = 0; i < p.packed.scales.elements(); ++i) {
      p.packed.scales.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(7 * i + i / 256);
    }
  }
  const std::vector<float> got = p.values();
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      const auto w = static_cast<float>(plain_weight(p.packed, i, j));
      const float value = got[static_cast<std::size_t>(i * k + j)];
      ASSERT_TRUE(std::isnan(w) ? std::isnan(value) : value == w) << i << " " << j;
    }
  }
}

TEST_P(EveryFormat, RowsAreAViewOfTheirs) {
  const std::int64_t n = 300, k = 77;
  const Packed p = Packed::of(GetParam(), normal_values(n * k, 5), n, k);
  const std::vector<float> all = p.values();
  for (const auto& [begin, end] :
       {std::pair<std::int64_t, std::int64_t>{0, 300}, {128, 261}, {128, 128}}) {
    const PackedMatrix part = p.packed.rows(begin, end);
    check_packed("part", part, Device{});
    std::vector<float> values(static_cast<std::size_t>((end - begin) * k));
    unpack(part, view(values.data(), {end - begin, k}));
    EXPECT_TRUE(std::equal(values.begin(), values.end(), all.begin() + begin * k));
  }
  EXPECT_THROW(p.packed.rows(10, 301), Error);
  EXPECT_THROW(p.packed.rows(-1, 3), Error);
  if (GetParam().format == Format::fp8_block) {
    EXPECT_THROW(p.packed.rows(64, 128), Error);
  }
}

// What other threads than this one worked, in seconds.
template <class Work>
double by_others(const Work& work) {
  const auto now = [](clockid_t clock) {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const auto others = [&] { return now(CLOCK_PROCESS_CPUTIME_ID) - now(CLOCK_THREAD_CPUTIME_ID); };
  const double before = others();
  work();
  return others() - before;
}

TEST(Pack, KeepsToALimitOfCores) {
  if (cpu_engine::available_cores() == 1) GTEST_SKIP() << "one core";
  constexpr std::int64_t n = 1024, k = 2048;
  const std::vector<float> values = normal_values(n * k, 7);
  std::vector<float> back(values.size());
  const auto work = [&] {
    const Packed packed = Packed::of({Format::nvfp4}, values, n, k);
    unpack(packed.packed, view(back.data(), {n, k}));
  };
  const double free = by_others(work);
  const cpu_engine::CoreLimit one(1);
  EXPECT_LT(by_others(work), free / 10);
}

// What lies far below the rest of a matrix becomes 0, not some multiple of what it was.
TEST(Dense3, GroupsFarBelowTheGlobalScale) {
  std::vector<float> weights(128, 1e-3F);
  std::fill_n(weights.begin(), 32, 3e38F);
  const std::vector<float> back = Packed::of({Format::dense3}, weights, 4, 32).values();
  for (std::size_t i = 32; i < back.size(); ++i) EXPECT_LE(std::abs(back[i]), 2e-3F) << i;
}

// How far a number reaches goes by the code before, the first one's least; the scale makes up for
// it.
TEST(Dense3, AnOutlierMayStandAnywhere) {
  for (const float outlier : {50.0F, -50.0F, 1e4F, -1e4F}) {
    for (std::size_t at = 0; at < 32; ++at) {
      std::vector<float> weights = normal_values(32, 11);
      weights[at] = outlier;
      const std::vector<float> back = Packed::of({Format::dense3}, weights, 1, 32).values();
      EXPECT_NEAR(back[at] / outlier, 1, 0.16) << outlier << " at " << at;
    }
  }
}

TEST(Int4, ZeroPointsAndOrderOfActivations) {
  const std::int64_t n = 5, k = 50;
  Packed p = Packed::of({Format::int4, 16}, normal_values(n * k, 7), n, k);
  std::vector<std::uint8_t> zeros;
  for (int i = 0; i < n * 4; ++i) zeros.push_back(static_cast<std::uint8_t>(i % 17));
  std::vector<std::int32_t> order;
  for (int i = 0; i < k; ++i) order.push_back(i * 7 % 4);
  std::vector<float> scales = normal_values(n * 4, 8);
  p.packed.zeros = view(zeros.data(), DType::u8, {n, 4});
  p.packed.group_of = view(order.data(), {k});
  p.packed.scales = view(scales.data(), {n, 4});
  const std::vector<float> got = p.values();
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      ASSERT_EQ(got[static_cast<std::size_t>(i * k + j)],
                static_cast<float>(plain_weight(p.packed, i, j)));
    }
  }
}

TEST(SparseNvfp4, KeepsTheLargestAndOfEqualsTheLower) {
  const std::vector<float> values = {1, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 4, 4, -6, 1, 4, 3, 3};
  const Packed p = Packed::of({Format::sparse_nvfp4}, values, 1, 18, 6 * 448);
  EXPECT_EQ(p.packed.global_scale, 1);
  const std::vector<float> wanted = {0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 4, 4, -6, 0, 0, 3, 3};
  EXPECT_EQ(p.packed.values.shape[1], 5);
  const std::vector<float> got = p.values();
  EXPECT_EQ(got[1], 2);
  EXPECT_EQ(got[3], 0);
  EXPECT_EQ(got[12], 4);
  EXPECT_EQ(got[13], -6);
  EXPECT_EQ(got[15], 0);
  const auto* places = p.packed.positions.as<std::uint8_t>();
  EXPECT_EQ(places[0], 1 | 2 << 2 | 0 << 4 | 1 << 6);
  EXPECT_EQ(places[1], 0 | 3 << 2 | 0 << 4 | 1 << 6);
  EXPECT_EQ(places[2], 0 | 1 << 2 | 0 << 4 | 1 << 6);  // and a pair of groups of its own
}

// The pair of the larger sum of squares, of equal ones the first.
TEST(SparseNvfp4, InPairsKeepsTheFirstOfEqualOnes) {
  const std::vector<float> values = {1, 2, 2, 1, 1, 2, 2, 2, 3, -3, 3, 3, 0, 0, 0, 0};
  const Context context = cpu({.threads = 1});
  const Buffer memory = context.allocate(packed_bytes({Format::sparse_nvfp4}, 1, 16));
  const PackedMatrix packed = pack_in_pairs(Format::sparse_nvfp4, values.data(), 1, 16, memory);
  const auto* places = packed.positions.as<std::uint8_t>();
  constexpr int first = 0 | 1 << 2, second = 2 | 3 << 2;
  EXPECT_EQ(places[0], first | second << 4);
  EXPECT_EQ(places[1], first | first << 4);
}

// By trying all scales near the published one in plain doubles.
TEST(SparseNvfp4, ScalesAreFittedToWhatIsKept) {
  const std::int64_t n = 40, k = 72;
  const Packed p = Packed::of({Format::sparse_nvfp4}, normal_values(n * k, 11), n, k);
  const auto* const scales = p.packed.scales.as<std::uint8_t>();
  int moved = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t first = 0; first < k; first += 16) {
      std::vector<float> kept;
      for (std::int64_t j = first; j < std::min(first + 16, k); j += 4) {
        const float* const from = p.matrix.data() + i * k + j;
        std::vector<float> four(from, from + 4);
        std::sort(four.begin(), four.end(),
                  [](float a, float b) { return std::fabs(a) > std::fabs(b); });
        kept.insert(kept.end(), four.begin(), four.begin() + 2);
      }
      const auto error = [&](int code) {
        const double scale = plain_e4m3(code) * static_cast<double>(p.packed.global_scale);
        double sum = 0;
        for (const float x : kept) {
          double least = 1e9;
          for (int c = 0; c < 16; ++c) {
            least = std::min(least, std::fabs(plain_e2m1(c) * scale - static_cast<double>(x)));
          }
          sum += least * least;
        }
        return sum;
      };
      const int rule =
          nvfp4_block_scale(largest(kept.data(), std::ssize(kept)), p.packed.global_scale);
      const int chosen = scales[i * 5 + first / 16];
      moved += chosen != rule;
      for (int code = rule - 2; code <= std::min(rule + 7, 0x7E); ++code) {
        ASSERT_LE(error(chosen), error(code) * (1 + 1e-12)) << i << " " << first << " " << code;
      }
    }
  }
  EXPECT_GT(moved, 100);
}

TEST(SparseNvfp4, AScaleIsThePublishedOneUnlessAnotherIsBetter) {
  const auto scale = [](std::vector<float> values) {
    return e4m3_to_f32(nvfp4_fitted_scale(values.data(), std::ssize(values), 1));
  };
  EXPECT_EQ(scale({6, 5}), 1.5F);  // 6 and 4.5; of scale 1 they were 6 and 4
  EXPECT_EQ(scale({6, 3}), 1);
  EXPECT_EQ(scale({4, 2}), 1);  // the rule's is 0.6875
  EXPECT_EQ(scale({0, 0, 0}), 1);
  EXPECT_EQ(scale({6 * 448, 5 * 448}), 416);  // there is none above 448
  EXPECT_EQ(scale({1e-9F, 0}), 0x1p-9F);
}

// Of up to 32 values, wherever zeros are among them: against a plain search.
TEST(SparseNvfp4, AScaleIsTheBestNearThePublishedOne) {
  for (const std::int64_t count : {1, 8, 15, 16, 17, 31, 32}) {
    for (int draw = 0; draw < 60; ++draw) {
      std::vector<float> values = normal_values(count, 100 * count + draw);
      for (std::int64_t i = 0; i < count; ++i) {
        const bool zero = draw % 4 == 1   ? i % 2 == 0
                          : draw % 4 == 2 ? i % 4 > 1
                          : draw % 4 == 3 ? i >= count / 2
                                          : false;
        if (zero) values[static_cast<std::size_t>(i)] = 0;
      }
      float most = 0;
      for (const float value : values) most = std::max(most, std::fabs(value));
      const float global = most / (6 * 40);
      const int rule = nvfp4_block_scale(most, global);
      int best = rule;
      double least = 0;
      for (int step = 0; step < 10; ++step) {  // the rule's, then two below it to seven above
        const int code = step == 0 ? rule : rule - 3 + step + (step > 2 ? 1 : 0);
        const double scale = static_cast<double>(e4m3_to_f32(static_cast<std::uint8_t>(code))) *
                             static_cast<double>(global);
        double sum = 0;
        for (const float value : values) {
          const auto x = static_cast<double>(value);
          const double error = static_cast<double>(e2m1_values[to_e2m1(x, scale)]) * scale - x;
          sum += error * error;
        }
        if (step == 0 || sum < least) least = sum, best = code;
      }
      EXPECT_EQ(nvfp4_fitted_scale(values.data(), count, global), best) << count << " " << draw;
    }
  }
}

TEST(Nvfp4, ScalesThatAreZeroDenormalOrHuge) {
  // A block 2^40 below the largest has the least scale; its values vanish, none divides by zero.
  std::vector<float> values(48, 0.0F);
  values[0] = 1e4F;
  values[17] = 1e4F * 0x1p-40F;
  const Packed p = Packed::of({Format::nvfp4}, values, 1, 48);
  const auto* scales = p.packed.scales.as<std::uint8_t>();
  EXPECT_EQ(scales[0], 0x7e);
  EXPECT_EQ(scales[1], 0x01);
  EXPECT_EQ(scales[2], 0x38);
  EXPECT_EQ(p.values()[17], 0);
  // A scale that is an e4m3 denormal still has its block's values.
  values[17] = p.packed.global_scale * 6 * 0x1.8p-8F;
  const Packed denormal = Packed::of({Format::nvfp4}, values, 1, 48);
  EXPECT_EQ(denormal.packed.scales.as<std::uint8_t>()[1], 3);
  EXPECT_FLOAT_EQ(denormal.values()[17], values[17]);
  // Shared by gate and up: values beyond it saturate.
  const Packed shared = Packed::of({Format::nvfp4}, {100, 1}, 1, 2, 10);
  EXPECT_FLOAT_EQ(shared.values()[0], 10);
}

}  // namespace
}  // namespace shunt
