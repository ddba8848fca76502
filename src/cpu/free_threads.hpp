// Work that is shared out to threads of its own, which end with it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cpu/features.hpp"
#include "cpu/pool.hpp"

namespace shunt::cpu_engine {

// fn(i) for each i below `count`, on as many cores as are free where the work is worth more than
// starting threads: `numbers` are read or written in all.
template <class Fn>
void on_free_cores(std::int64_t count, std::int64_t numbers, const Fn& fn) {
  constexpr std::int64_t worth_a_thread = std::int64_t{1} << 18;
  const auto threads =
      static_cast<int>(std::min<std::int64_t>({free_cores(), count, numbers / worth_a_thread}));
  if (threads <= 1) {
    for (std::int64_t i = 0; i < count; ++i) fn(i);
    return;
  }
  const auto one = [&](std::size_t i) { fn(static_cast<std::int64_t>(i)); };
  Pool pool(threads, Isa::scalar);
  pool.run([&](Team& team) { team.for_each(static_cast<std::size_t>(count), one); });
}

}  // namespace shunt::cpu_engine
