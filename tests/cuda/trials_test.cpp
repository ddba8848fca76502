// The names of SHUNT_CUDA_TRY.
#include "cuda/trials.hpp"

#include <gtest/gtest.h>

#include "shunt/error.hpp"

namespace shunt::cuda_engine {
namespace {

TEST(Trials, AreNamedOneByOne) {
  EXPECT_FALSE(tried("", "one_launch"));
  EXPECT_TRUE(tried("one_launch,", "one_launch"));  // a comma at the end names nothing
  EXPECT_TRUE(tried("one_launch", "one_launch"));
  EXPECT_FALSE(tried("one_launch", "combine_slots"));
  EXPECT_TRUE(tried("one_launch,combine_slots", "one_launch"));
  EXPECT_TRUE(tried("one_launch,combine_slots", "combine_slots"));
}

TEST(Trials, RefuseWhatThereIsNot) {
  for (const char* list : {"one-launch", "one_launch,,combine_slots", ",", "all"}) {
    try {
      (void)tried(list, "one_launch");
      ADD_FAILURE() << list;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument) << list;
    }
  }
}

}  // namespace
}  // namespace shunt::cuda_engine
