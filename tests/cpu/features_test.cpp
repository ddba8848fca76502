#include "cpu/features.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "cpu/pool.hpp"
#include "shunt/context.hpp"
#include "shunt/error.hpp"

namespace shunt::cpu_engine {
namespace {

struct IsaVariable {
  explicit IsaVariable(const char* value) { setenv("SHUNT_ISA", value, 1); }
  ~IsaVariable() { unsetenv("SHUNT_ISA"); }
};

TEST(Features, EachSetNeedsThoseBeforeIt) {
  EXPECT_TRUE(supported(Isa::scalar));
  for (int i = 1; i < isa_count; ++i) {
    if (supported(static_cast<Isa>(i))) {
      EXPECT_TRUE(supported(static_cast<Isa>(i - 1)));
    }
  }
  EXPECT_TRUE(supported(best_isa()));
}

TEST(Features, BestIsTheSameEveryTime) {
  const Isa first = best_isa();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(best_isa(), first);
}

TEST(Features, TheVariableNamesALesserSet) {
  for (int i = 0; i < isa_count; ++i) {
    const Isa isa = static_cast<Isa>(i);
    const IsaVariable variable(to_string(isa));
    if (supported(isa)) {
      EXPECT_EQ(selected_isa(), isa);
      EXPECT_EQ(cpu({.threads = 1}).pool().isa(), isa);
    } else {
      EXPECT_THROW(selected_isa(), Error);
    }
  }
}

TEST(Features, AnUnknownSetIsRefusedByName) {
  const IsaVariable variable("sse9");
  try {
    selected_isa();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::unsupported);
    EXPECT_NE(std::string(error.what()).find("sse9"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("scalar"), std::string::npos);
  }
}

TEST(Features, AnEmptyVariableIsNone) {
  const IsaVariable variable("");
  EXPECT_EQ(selected_isa(), best_isa());
}

TEST(Features, TuningIsWhatFamiliesWereMeasuredToWant) {
  Features f;
  f.avx512_vnni = true;
  const Features common = tuned(f, Tuning::common), zen5 = tuned(common, Tuning::zen5);
  EXPECT_FALSE(common.int8_by_words || common.shifts_beside_dots);
  EXPECT_TRUE(zen5.int8_by_words && zen5.shifts_beside_dots && zen5.fewer_loads);
  EXPECT_GT(zen5.fetch_ahead, common.fetch_ahead);
  EXPECT_EQ(tuned(zen5, Tuning::common).fetch_ahead, common.fetch_ahead);
  f.amx_tile = true;
  EXPECT_EQ(tuned(f, Tuning::common).fetch_ahead, zen5.fetch_ahead);
  EXPECT_EQ(zen5.fetch_near, 0U);
  EXPECT_GT(tuned(f, Tuning::common).fetch_near, 0U);
  EXPECT_LT(tuned(f, Tuning::common).fetch_near, tuned(f, Tuning::common).fetch_ahead);
  f.avx512_vnni = false;  // which words need
  EXPECT_FALSE(tuned(f, Tuning::zen5).int8_by_words);
}

TEST(Features, AtLeastOneCore) { EXPECT_GE(available_cores(), 1); }

TEST(Features, ALimitHoldsWhileItLives) {
  EXPECT_EQ(free_cores(), available_cores());
  {
    const CoreLimit one(1);
    EXPECT_EQ(free_cores(), 1);
    {
      const CoreLimit more(1 << 20), all(0);
      EXPECT_EQ(free_cores(), available_cores());
    }
    EXPECT_EQ(free_cores(), 1);
  }
  EXPECT_EQ(free_cores(), available_cores());
}

}  // namespace
}  // namespace shunt::cpu_engine
