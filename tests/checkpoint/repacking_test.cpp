#include "checkpoint/repacking.hpp"

#include <gtest/gtest.h>

namespace shunt {
namespace {

TEST(Repacking, WorksOnlyWhereItIsAskedTo) {
  for (const bool fill : {true, false}) {
    Repacking repacking;
    auto* const memory = static_cast<char*>(repacking.take(1));
    *memory = 0;
    repacking.later([&] { *memory = 1; });
    const std::shared_ptr<const void> kept = repacking.finish(fill);
    EXPECT_NE(kept, nullptr);
    EXPECT_EQ(*memory, fill ? 1 : 0);
    EXPECT_EQ(repacking.finish(fill), nullptr);
  }
}

}  // namespace
}  // namespace shunt
