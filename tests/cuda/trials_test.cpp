// The names of SHUNT_CUDA_TRY.
#include "cuda/trials.hpp"

#include <gtest/gtest.h>

#include "shunt/error.hpp"

namespace shunt::cuda_engine {
namespace {

TEST(Trials, AreNamedOneByOne) {
  EXPECT_FALSE(tried("", "one_launch"));
  EXPECT_TRUE(tried("one_launch", "one_launch"));
  EXPECT_FALSE(tried("one_launch", "fp8_shared_rows"));
  EXPECT_TRUE(tried("one_launch,fp8_shared_rows", "one_launch"));
  EXPECT_TRUE(tried("one_launch,fp8_shared_rows", "fp8_shared_rows"));
}

TEST(Trials, RefuseWhatThereIsNot) {
  for (const char* list :
       {"one-launch", "one_launch,", "one_launch,,fp8_shared_rows", ",", "all"}) {
    if (std::string_view(list) == "one_launch,") {
      EXPECT_TRUE(tried(list, "one_launch"));  // a comma at the end names nothing
      continue;
    }
    try {
      (void)tried(list, "one_launch");
      ADD_FAILURE() << list;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      EXPECT_NE(std::string_view(error.what()).find("SHUNT_CUDA_TRY"), std::string_view::npos);
    }
  }
}

}  // namespace
}  // namespace shunt::cuda_engine
