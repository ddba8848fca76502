#include <gtest/gtest.h>

#include <cstdio>

#include "engine.hpp"
#include "shunt/error.hpp"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (shunt::test::on_gpu() && !::testing::GTEST_FLAG(list_tests)) {
    try {
      shunt::cuda();
    } catch (const shunt::Error& error) {
      std::printf("skipped: %s\n", error.what());
      return 77;
    }
  }
  return RUN_ALL_TESTS();
}
