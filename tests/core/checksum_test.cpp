#include "core/checksum.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace shunt {
namespace {

TEST(Checksum, TellsEveryBitAndTheLength) {
  for (const std::size_t size : {0, 1, 7, 8, 63, 64, 65, 300}) {
    std::vector<char> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 37 + 11);
    const std::uint64_t sum = checksum(bytes.data(), size);
    for (std::size_t i = 0; i < 8 * size; ++i) {
      bytes[i / 8] = static_cast<char>(bytes[i / 8] ^ 1 << i % 8);
      EXPECT_NE(checksum(bytes.data(), size), sum) << "bit " << i << " of " << size << " bytes";
      bytes[i / 8] = static_cast<char>(bytes[i / 8] ^ 1 << i % 8);
    }
    EXPECT_EQ(checksum(bytes.data(), size), sum);
    bytes.push_back(0);
    EXPECT_NE(checksum(bytes.data(), size + 1), sum) << size;
  }
}

// Signs of numbers that a sum of words would lose, and pieces that changed places.
TEST(Checksum, TellsWhatASumDoesNot) {
  std::vector<char> bytes(1024, 1);
  const std::uint64_t sum = checksum(bytes.data(), bytes.size());
  bytes[7] = bytes[7 + 128] = static_cast<char>(0x81);
  EXPECT_NE(checksum(bytes.data(), bytes.size()), sum);
  const std::string near = std::string(64, 'a') + std::string(64, 'b');
  const std::string far = std::string(64, 'b') + std::string(64, 'a');
  EXPECT_NE(checksum(near.data(), 128), checksum(far.data(), 128));
}

}  // namespace
}  // namespace shunt
