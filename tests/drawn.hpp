// For tests whose cases are drawn at random.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "sanitizer.hpp"
#include "shunt/error.hpp"
#include "shunt/format.hpp"

namespace shunt::test {

// Numbers of one seed, the same everywhere.
class Draw {
 public:
  explicit Draw(unsigned seed) : random_(seed) {}

  bool one_in(int n) { return random_() % static_cast<unsigned>(n) == 0; }
  std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(high - low + 1));
  }
  template <class T>
  T any(std::initializer_list<T> of) {
    return of.begin()[random_() % of.size()];
  }
  DType dtype() { return any({DType::f32, DType::bf16, DType::f16}); }
  // At most `most`; often what tiles and vectors like, sometimes a little more or less.
  std::int64_t width(std::int64_t most) {
    const std::int64_t unit = any<std::int64_t>({1, 8, 16, 32, 64, 128, 128});
    if (most < unit) return between(1, most);
    const std::int64_t whole = unit * between(1, most / unit);
    if (!one_in(6)) return whole;
    return std::clamp<std::int64_t>(whole + any<std::int64_t>({-1, 1, 2}), 1, most);
  }
  // Of so many weights: dense3 takes long to encode.
  FormatSpec format(std::int64_t weights) {
    const std::vector<FormatSpec> all = known_formats();
    FormatSpec spec = all[random_() % all.size()];
    if (spec.format == Format::int4) spec.group = any({16, 32, 64, 128, 48});
    return spec.format == Format::dense3 && weights > 400000 ? FormatSpec{Format::mxfp4} : spec;
  }

 private:
  std::mt19937 random_;
};

// check(seed) for the seeds 1 to `count`, under a sanitizer for the first quarter of them, or for
// those that the environment variable SHUNT_DRAWN=first:count names. A check that returns false was
// refused, which a third at least must not be.
template <class Check>
void each_seed(unsigned count, const Check& check) {
  unsigned first = 1, computed = 0;
  if (SHUNT_SANITIZED) count = (count + 3) / 4;
  if (const char* const asked = std::getenv("SHUNT_DRAWN")) {
    ASSERT_EQ(std::sscanf(asked, "%u:%u", &first, &count), 2)
        << "SHUNT_DRAWN is '" << asked << "': must be first:count";
  }
  for (unsigned seed = first; seed < first + count; ++seed) {
    try {
      if constexpr (std::is_same_v<decltype(check(seed)), bool>) {
        computed += check(seed) ? 1 : 0;
      } else {
        check(seed);
        ++computed;
      }
    } catch (const Error& error) {
      ADD_FAILURE() << "seed " << seed << ": " << error.what();
    }
  }
  if (count >= 20) {
    EXPECT_GE(3 * computed, count) << "of " << count << ", others were refused";
  }
}

}  // namespace shunt::test
