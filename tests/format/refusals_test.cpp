#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>

#include "format/plain.hpp"

namespace shunt {
namespace {

std::string message(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    return error.what();
  }
  return "(nothing thrown)";
}

TEST(FormatRefusals, NanAndInfinitiesByPlace) {
  for (const FormatSpec& spec : known_formats()) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
      std::vector<float> values = normal_values(6 * 40, 1);
      values[3 * 40 + 7] = bad;
      const std::string what = message([&] { Packed::of(spec, values, 6, 40); });
      EXPECT_NE(what.find("matrix[3, 7]"), std::string::npos) << what;
    }
  }
}

TEST(FormatRefusals, FormatsAndGroups) {
  EXPECT_NE(message([] { packed_bytes({Format::plain}, 1, 1); }).find("plain"), std::string::npos);
  EXPECT_NE(message([] {
              packed_bytes({Format::int4, 8}, 1, 1);
            }).find("multiple of 16"),
            std::string::npos);
  EXPECT_NE(message([] {
              packed_bytes({Format::nvfp4, 16}, 1, 1);
            }).find("only int4"),
            std::string::npos);
  EXPECT_NE(message([] { packed_bytes({Format::nvfp4}, -1, 1); }).find("n is -1"),
            std::string::npos);
  EXPECT_NE(message([] { packed_bytes({Format::nvfp4}, 1, std::int64_t{1} << 62); }).find("64-bit"),
            std::string::npos);
  const std::vector<float> values(16, 1.0F);
  EXPECT_NE(message([&] { Packed::of({Format::mxfp4}, values, 1, 16, 3); }).find("global_amax"),
            std::string::npos);
  EXPECT_NE(message([&] {
              pack({Format::mxfp4}, view(values.data(), {1, 16}), {});
            }).find("pack: memory is null: "),
            std::string::npos);
}

TEST(FormatRefusals, WhatIsNoFormat) {
  const FormatSpec none{.format = Format{99}};
  EXPECT_EQ(to_string(none), "99");
  EXPECT_NE(message([&] { (void)bits_per_weight(none); }).find("format is 99"), std::string::npos);
  EXPECT_NE(message([&] { (void)packed_bytes(none, 8, 8); }).find("format is 99"),
            std::string::npos);
  PackedMatrix matrix{.format = none, .n = 1, .k = 1};
  const std::uint8_t byte = 0;
  matrix.values = view(static_cast<const void*>(&byte), DType::u8, {1, 1});
  EXPECT_NE(message([&] { check_packed("w", matrix, Device{}); }).find("format is 99"),
            std::string::npos);
}

TEST(FormatRefusals, RowFormatsHaveNames) {
  EXPECT_EQ(to_string(RowFormat::as_dtype), "as_dtype");
  EXPECT_EQ(to_string(RowFormat::fp8_token), "fp8_token");
  EXPECT_EQ(to_string(RowFormat::fp8_block), "fp8_block");
  EXPECT_EQ(to_string(RowFormat::nvfp4), "nvfp4");
  EXPECT_EQ(to_string(RowFormat{9}), "9");
}

TEST(FormatRefusals, TensorsThatDoNotFit) {
  const auto check = [](const PackedMatrix& m) {
    return message([&] { check_packed("w", m, Device{}); });
  };
  const Packed p = Packed::of({Format::nvfp4}, normal_values(4 * 33, 1), 4, 33);
  const auto with = [&](auto change) {
    PackedMatrix m = p.packed;
    change(m);
    return check(m);
  };
  EXPECT_NE(with([](PackedMatrix& m) { m.values.shape[1] = 16; }).find("w.values"),
            std::string::npos);
  EXPECT_NE(with([](PackedMatrix& m) { m.scales.dtype = DType::f8_e8m0; }).find("w.scales"),
            std::string::npos);
  EXPECT_NE(with([](PackedMatrix& m) { m.scales = {}; }).find("w.scales"), std::string::npos);
  EXPECT_NE(with([](PackedMatrix& m) { m.zeros = m.scales; }).find("w.zeros"), std::string::npos);
  EXPECT_NE(with([](PackedMatrix& m) { m.global_scale = std::nanf(""); }).find("global_scale"),
            std::string::npos);
  const Packed q = Packed::of({Format::int4, 16}, normal_values(4 * 33, 1), 4, 33);
  std::vector<std::int32_t> order(33, 0);
  order[32] = 3;
  PackedMatrix m = q.packed;
  m.group_of = view(order.data(), {33});
  EXPECT_NE(check(m).find("w.group_of[32] is 3: must be 0 to 2"), std::string::npos);
  m = q.packed;
  m.global_scale = 2;
  EXPECT_NE(check(m).find("must be 1"), std::string::npos);
}

TEST(FormatRefusals, MemoryOverWhatIsPacked) {
  const FormatSpec spec{.format = Format::int8};
  const Buffer memory = cpu().allocate(packed_bytes(spec, 4, 64) + 4096);
  auto* const numbers = static_cast<float*>(memory.data());
  EXPECT_EQ(message([&] {
              pack(spec, view(numbers + 8, {4, 64}), memory);
            }),
            "pack: memory overlaps matrix: must lie apart");
}

TEST(FormatRefusals, OutOverWhatIsUnpacked) {
  const auto unpacked = [](const FormatSpec& spec, auto part) {
    const Packed p = Packed::of(spec, normal_values(4 * 64, 1), 4, 64);
    std::vector<float> memory(512);
    PackedMatrix m = p.packed;
    Tensor& tensor = m.*part;
    std::memcpy(memory.data() + 200, tensor.data, static_cast<std::size_t>(tensor.bytes()));
    tensor.data = memory.data() + 200;
    const std::string free = message([&] { unpack(m, view(memory.data() + 256, {4, 64})); });
    EXPECT_EQ(free, "(nothing thrown)");
    EXPECT_EQ(message([&] {
                unpack(m, view(memory.data(), {64, 4}).transposed());
              }),
              message([&] {
                unpack(m, view(memory.data(), {4, 64}));
              }));
    return message([&] { unpack(m, view(memory.data(), {4, 64})); });
  };
  const FormatSpec zeros{.format = Format::int4, .group = 32, .zeros = true};
  EXPECT_EQ(unpacked({Format::nvfp4}, &PackedMatrix::values),
            "unpack: out overlaps matrix.values: must lie apart");
  EXPECT_EQ(unpacked({Format::nvfp4}, &PackedMatrix::scales),
            "unpack: out overlaps matrix.scales: must lie apart");
  EXPECT_EQ(unpacked(zeros, &PackedMatrix::zeros),
            "unpack: out overlaps matrix.zeros: must lie apart");
  EXPECT_EQ(unpacked({Format::sparse_nvfp4}, &PackedMatrix::positions),
            "unpack: out overlaps matrix.positions: must lie apart");
}

TEST(FormatNames, PrintAndParse) {
  for (const FormatSpec& spec : known_formats()) {
    EXPECT_EQ(resolved(format_from_string(to_string(spec))), spec);
    EXPECT_GT(bits_per_weight(spec), 3);
    // Bits of a large matrix are its bytes.
    EXPECT_NEAR(static_cast<double>(packed_bytes(spec, 4096, 4096)) * 8 / (4096.0 * 4096.0),
                bits_per_weight(spec), 0.01)
        << to_string(spec);
  }
  EXPECT_EQ(format_from_string("int4:64"), (FormatSpec{Format::int4, 64}));
  EXPECT_EQ(format_from_string("int4:64:ordered"), (FormatSpec{Format::int4, 64, true}));
  EXPECT_EQ(to_string(FormatSpec{Format::int4, 64, true}), "int4:64:ordered");
  for (const FormatSpec& spec :
       {FormatSpec{.format = Format::int4, .group = 64, .zeros = true},
        FormatSpec{.format = Format::int4, .ordered = true, .zeros = true}}) {
    EXPECT_EQ(format_from_string(to_string(spec)), spec);
    EXPECT_NE(message([&] { packed_bytes(resolved(spec), 4, 64); }).find("have zeros"),
              std::string::npos);
  }
  EXPECT_EQ(to_string(FormatSpec{Format::int4, 32, true, true}), "int4:32:ordered:zeros");
  EXPECT_NE(message([] { format_from_string("mxfp4:zeros"); }).find("only int4"),
            std::string::npos);
  EXPECT_NE(message([] { format_from_string("nvfp4:ordered"); }).find("only int4"),
            std::string::npos);
  EXPECT_NE(message([] {
              (void)packed_bytes({Format::int4, 64, true}, 4, 64);
            }).find("prepared"),
            std::string::npos);
  EXPECT_EQ(resolved({Format::int4}), (FormatSpec{Format::int4, 32}));
  EXPECT_NE(message([] { format_from_string("nvfp5"); }).find("nvfp4"), std::string::npos);
}

}  // namespace
}  // namespace shunt
