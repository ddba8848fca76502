// The pool's threads: who may call it, how they compute, and what a fork leaves of them.
#include "cpu/pool.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "cpu/float_mode.hpp"
#include "sanitizer.hpp"
#include "shunt/error.hpp"

namespace shunt::cpu_engine {
namespace {

TEST(Pool, ASecondCallerIsRefused) {
  Pool pool(2);
  std::string message;
  pool.run([&](int thread) {
    if (thread != 0) return;
    std::thread([&] {
      try {
        pool.run([](int) {});
      } catch (const Error& error) {
        message = error.what();
      }
    }).join();
  });
  EXPECT_NE(message.find("must be one thread at a time"), std::string::npos) << message;
  std::atomic<int> ran{0};
  pool.run([&](int) { ++ran; });
  EXPECT_EQ(ran, 2);
}

// Memory may be out on any thread: the caller hears of it, and the pool goes on.
TEST(Pool, WhatAThreadThrowsReachesTheCaller) {
  for (const int threads : {1, 2, 3}) {
    Pool pool(threads);
    for (int who = 0; who < threads; ++who) {
      EXPECT_THROW(pool.run([&](int thread) {
        if (thread == who) throw std::bad_alloc();
      }),
                   std::bad_alloc);
    }
    EXPECT_THROW(pool.run([](int) { throw std::bad_alloc(); }), std::bad_alloc);
    // In the first of two loops: the next call has every task once all the same.
    for (int turn = 0; turn < 3; ++turn) {
      EXPECT_THROW(pool.run([&](Team& team) {
        team.for_each(20, [](std::size_t task) {
          if (task == 3) throw std::bad_alloc();
        });
        team.for_each(20, [](std::size_t) {});
      }),
                   std::bad_alloc);
      std::array<std::atomic<int>, 50> done{};
      pool.run([&](Team& team) { team.for_each(done.size(), [&](std::size_t i) { ++done[i]; }); });
      for (const std::atomic<int>& times : done) EXPECT_EQ(times, 1);
    }
  }
}

TEST(Pool, TheChildOfAForkHasItsOwnThreadAlone) {
  if (SHUNT_SANITIZED) GTEST_SKIP() << "a sanitizer's threads do not survive a fork";
  for (const bool used : {false, true}) {
    auto pool = std::make_unique<Pool>(3);
    if (used) pool->run([](int) {});
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      std::atomic<int> sum{0};
      pool->run([&](Team& team) {
        team.for_each(100, [&](std::size_t task) { sum += static_cast<int>(task); });
        team.barrier();
      });
      pool->split(10, 1, [&](std::int64_t begin, std::int64_t end) {
        sum += static_cast<int>(end - begin);
      });
      const bool right = sum == 4950 + 10 && pool->threads() == 1;
      pool.reset();
      _exit(right ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    EXPECT_EQ(pool->threads(), 3) << "the parent's";
    std::atomic<int> ran{0};
    pool->run([&](int) { ++ran; });
    EXPECT_EQ(ran, 3);
  }
}

// A fork while another thread is at work leaves the child nothing of it.
TEST(Pool, ForksWhileOthersWork) {
  if (SHUNT_SANITIZED) GTEST_SKIP() << "a sanitizer's threads do not survive a fork";
  Pool pool(3);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) {
      pool.run([](Team& team) {
        for (int n = 0; n < 20; ++n) team.for_each(50, [](std::size_t) {});
      });
    }
  });
  int wrong = 0;
  for (int n = 0; n < 60; ++n) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      int ran = 0;
      pool.run([&](Team& team) { team.for_each(100, [&](std::size_t) { ++ran; }); });
      _exit(ran == 100 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    wrong += WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
  }
  stop = true;
  busy.join();
  EXPECT_EQ(wrong, 0);
}

#if defined(__x86_64__)
TEST(FloatMode, IsTheUsualOneWhileItLives) {
  constexpr unsigned flushing = 0x9fc0, flags = 0x3f;
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(flushing);
  {
    const FloatMode mode;
    EXPECT_EQ(__builtin_ia32_stmxcsr() & ~flags, 0x1f80U);
  }
  EXPECT_EQ(__builtin_ia32_stmxcsr() & ~flags, flushing & ~flags);
  // Workers begin as their maker is.
  Pool pool(3);
  std::atomic<int> usual{0};
  pool.run([&](int thread) {
    if (thread > 0 && (__builtin_ia32_stmxcsr() & ~flags) == 0x1f80U) ++usual;
  });
  __builtin_ia32_ldmxcsr(before);
  EXPECT_EQ(usual, 2);
}
#endif

}  // namespace
}  // namespace shunt::cpu_engine
