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
  EXPECT_FALSE(tried("one_launch", "fp8_shared_rows"));
  EXPECT_TRUE(tried("one_launch,fp8_shared_rows", "one_launch"));
  EXPECT_TRUE(tried("one_launch,fp8_shared_rows", "fp8_shared_rows"));
}

TEST(Trials, RefuseWhatThereIsNot) {
  for (const char* list : {"one-launch", "one_launch,,fp8_shared_rows", ",", "all"}) {
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
