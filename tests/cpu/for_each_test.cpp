#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "cpu/pool.hpp"

namespace shunt::cpu_engine {
namespace {

TEST(ForEach, EveryTaskOnceWhateverTheNumbers) {
  for (const int threads : {1, 2, 3, 5}) {
    Pool pool(threads);
    for (const std::size_t tasks : {0, 1, 2, 3, 7, 64, 1000}) {
      std::vector<std::atomic<int>> seen(tasks);
      pool.run([&](Team& team) { team.for_each(tasks, [&](std::size_t task) { ++seen[task]; }); });
      for (const auto& count : seen) EXPECT_EQ(count, 1);
    }
  }
}

// Loops that follow one another without a barrier: a fast thread is several loops ahead.
TEST(ForEach, LoopsNeedNoBarrierBetweenThem) {
  Pool pool(4);
  constexpr std::size_t loops = 300, tasks = 5;
  std::vector<std::atomic<int>> seen(loops * tasks);
  pool.run([&](Team& team) {
    for (std::size_t loop = 0; loop < loops; ++loop) {
      team.for_each(tasks, [&](std::size_t task) { ++seen[loop * tasks + task]; });
    }
  });
  for (const auto& count : seen) EXPECT_EQ(count, 1);
}

TEST(ForEach, OthersTakeTheTasksOfASlowThread) {
  Pool pool(2);
  std::atomic<int> done{0};
  pool.run([&](Team& team) {
    team.for_each(20, [&](std::size_t task) {
      // The caller's first task lasts until all others are done, its own part included.
      if (task == 0) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (done < 19 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        EXPECT_EQ(done, 19);
      }
      ++done;
    });
  });
  EXPECT_EQ(done, 20);
}

TEST(ForEach, WhatWasWrittenBeforeABarrierIsSeenAfter) {
  Pool pool(3);
  std::vector<int> data(300, 0);
  std::atomic<int> wrong{0};
  for (int round = 1; round <= 50; ++round) {
    pool.run([&](Team& team) {
      team.for_each(data.size(), [&](std::size_t i) { data[i] = round; });
      team.barrier();
      for (const int value : data) wrong += value != round;
    });
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Pool, TellsItsInstructionSet) {
  EXPECT_EQ(Pool(1, Isa::scalar).isa(), Isa::scalar);
  EXPECT_EQ(Pool(1).isa(), best_isa());
}

}  // namespace
}  // namespace shunt::cpu_engine
