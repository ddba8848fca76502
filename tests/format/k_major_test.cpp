#include <gtest/gtest.h>

#include "format/k_major.hpp"
#include "format/plain.hpp"
#include "shunt/sparse.hpp"

namespace shunt {
namespace {

TEST(KMajor, WrittenAsTheWordsSayAndReadBack) {
  const std::int64_t n = 70, k = 144;
  const Packed p = Packed::of({Format::sparse_nvfp4}, normal_values(n * k, 1), n, k);
  KMajor out(n, k);
  to_k_major(p.packed, out.views);
  const std::vector<float> values = p.values();
  for (std::int64_t row = 0; row < n; ++row) {
    for (std::int64_t i = 0; i < k; ++i) {
      const auto at = [&](const std::vector<std::uint8_t>& bytes, std::int64_t r) {
        return static_cast<int>(bytes[static_cast<std::size_t>(r * n + row)]);
      };
      const int place = at(out.meta, i / 8) >> (i % 8 < 4 ? 0 : 4), pair = at(out.comp, i / 4);
      double w = 0;
      if ((place & 3) == i % 4) w = plain_e2m1(pair & 15);
      if ((place >> 2 & 3) == i % 4) w = plain_e2m1(pair >> 4);
      w *= plain_e4m3(at(out.scale, i / 16)) * static_cast<double>(out.views.global_scale);
      ASSERT_EQ(static_cast<float>(w), values[static_cast<std::size_t>(row * k + i)]);
    }
  }
  std::vector<std::uint64_t> memory(packed_bytes({Format::sparse_nvfp4}, n, k) / 8 + 8);
  const auto aligned = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
  const PackedMatrix back =
      from_k_major(out.views, {reinterpret_cast<void*>(aligned), memory.size() * 8 - 64});
  check_packed("back", back, Device{});
  std::vector<float> again(values.size());
  unpack(back, view(again.data(), {n, k}));
  EXPECT_EQ(again, values);

  // The same weights with every second group's two in the other order.
  for (std::size_t i = 0; i < out.meta.size(); ++i) {
    const int two = out.meta[i] >> 4;
    out.meta[i] = static_cast<std::uint8_t>((out.meta[i] & 15) | (two >> 2 | (two & 3) << 2) << 4);
    const std::size_t row = i / static_cast<std::size_t>(n),
                      column = i % static_cast<std::size_t>(n);
    std::uint8_t& value = out.comp[(2 * row + 1) * static_cast<std::size_t>(n) + column];
    value = static_cast<std::uint8_t>(value >> 4 | value << 4);
  }
  const PackedMatrix turned =
      from_k_major(out.views, {reinterpret_cast<void*>(aligned), memory.size() * 8 - 64});
  check_packed("turned", turned, Device{});
  unpack(turned, view(again.data(), {n, k}));
  EXPECT_EQ(again, values);
}

TEST(KMajor, RefusesWhatDoesNotFit) {
  KMajor m(8, 32);
  const auto message = [&]() -> std::string {
    std::vector<std::uint64_t> memory(200);
    const auto aligned = (reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64;
    try {
      from_k_major(m.views, {reinterpret_cast<void*>(aligned), 1500});
    } catch (const Error& error) {
      return error.what();
    }
    return "(none)";
  };
  EXPECT_NE(message().find("meta[0, 0] is 0x00: positions must differ"), std::string::npos);
  for (std::uint8_t& byte : m.meta) byte = 0x44;
  EXPECT_EQ(message(), "(none)");
  m.views.scale.shape[0] = 1;
  EXPECT_NE(message().find("scale"), std::string::npos);
  const Packed p = Packed::of({Format::nvfp4}, normal_values(8 * 32, 1), 8, 32);
  EXPECT_THROW(to_k_major(p.packed, m.views), Error);
}

}  // namespace
}  // namespace shunt
