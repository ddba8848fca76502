// Of bytes as they lie, to tell when a disk or a copy has changed some.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shunt {

// Eight words of 64 bits at once, each into a lane of its own, none of which forgets what it was:
// about as fast as memory is read.
inline std::uint64_t checksum(const void* data, std::size_t bytes) {
  constexpr std::uint64_t odd = 0x9e3779b97f4a7c15U;
  std::array<std::uint64_t, 8> lanes{};
  constexpr std::size_t step = sizeof lanes;
  const auto add = [&](const char* from) {
    for (std::uint64_t& lane : lanes) {
      std::uint64_t word = 0;
      std::memcpy(&word, from, sizeof word);
      from += sizeof word;
      lane = std::rotl(lane ^ word, 29) * odd;
    }
  };
  const char* const from = static_cast<const char*>(data);
  const std::size_t whole = bytes / step * step;
  for (std::size_t at = 0; at < whole; at += step) add(from + at);
  if (whole < bytes) {
    char rest[step] = {};
    std::memcpy(rest, from + whole, bytes - whole);
    add(rest);
  }
  std::uint64_t result = bytes;
  for (const std::uint64_t lane : lanes) {
    result = (result ^ lane) * odd;
    result ^= result >> 32;
  }
  return result;
}

}  // namespace shunt
