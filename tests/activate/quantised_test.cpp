// activate to fp8, on every engine: the results of activate() in f32, rounded as gather's reference
// rounds rows.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "core/convert.hpp"
#include "engines.hpp"
#include "order/reference.hpp"
#include "shunt/activate.hpp"
#include "shunt/error.hpp"

namespace shunt {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

struct Case {
  std::int64_t rows = 3, width = 256;
  std::int64_t gap = 0;  // behind each row of gate, up and out, in elements
  DType gate = DType::bf16, up = DType::bf16;
  bool columns_first = false;  // scales of a block lie together
};

// Numbers whose size differs from row to row and from block to block.
std::vector<std::uint32_t> drawn(std::mt19937& random, const Case& c, DType dtype) {
  std::normal_distribution<float> normal;
  const std::int64_t stride = c.width + c.gap;
  std::vector<std::uint32_t> memory(at(c.rows * stride + 1));
  for (std::int64_t r = 0; r < c.rows; ++r) {
    for (std::int64_t h = 0; h < c.width; h += 128) {
      const float size = std::exp2(static_cast<float>(random() % 12) - 8);
      for (std::int64_t i = h; i < std::min(h + 128, c.width); ++i) {
        store_f32(memory.data(), dtype, r * stride + i, size * normal(random));
      }
    }
  }
  return memory;
}

struct Result {
  std::vector<std::uint8_t> values;
  std::vector<float> scales;
  bool operator==(const Result&) const = default;

  Result(const Case& c, const QuantiseSpec& quantise)
      : values(at(c.rows * (c.width + c.gap) + 1), 0x4d),
        scales(at(c.rows * (quantise.quantise == Quantise::row ? 1 : (c.width + 127) / 128) + 1),
               77.0F) {}
  Tensor out(const Case& c) {
    Tensor t = view(values.data(), DType::f8_e4m3, {c.rows, c.width});
    t.strides[0] = c.width + c.gap;
    return t;
  }
  Tensor scale(const Case& c, const QuantiseSpec& quantise) {
    const std::int64_t blocks = (c.width + 127) / 128;
    if (quantise.quantise == Quantise::row) return view(scales.data(), {c.rows});
    return c.columns_first ? view(scales.data(), {blocks, c.rows}).transposed()
                           : view(scales.data(), {c.rows, blocks});
  }
};

void check(const test::Engine& engine, const Case& c, const ActivationSpec& spec,
           const QuantiseSpec& quantise, std::int32_t count) {
  SCOPED_TRACE(testing::Message() << describe(spec) << " R" << c.rows << " I" << c.width << " gap "
                                  << c.gap << " " << to_string(c.gate) << " " << to_string(c.up)
                                  << " quantise " << static_cast<int>(quantise.quantise) << " "
                                  << quantise.scale_upper_bound << " count " << count);
  std::mt19937 random(7);
  const auto gate = drawn(random, c, c.gate), up = drawn(random, c, c.up);
  const auto tensor = [&](const std::vector<std::uint32_t>& data, DType dtype) {
    Tensor t = view(data.data(), dtype, {c.rows, c.width});
    t.strides[0] = c.width + c.gap;
    return t;
  };
  const Context context = test::context_of(engine, 2);
  Result got(c, quantise);
  std::vector<float> wide(at(c.rows * c.width + 1));
  {
    test::Mirror mirror(context);
    const Tensor g = spec.gated ? mirror.in(tensor(gate, c.gate)) : Tensor{};
    const Tensor u = mirror.in(tensor(up, c.up)), rows = mirror.in(view(&count, {1}));
    activate(context, spec, quantise, g, u, mirror.out(got.out(c)),
             mirror.out(got.scale(c, quantise)), rows);
    activate(context, spec, g, u, mirror.out(view(wide.data(), {c.rows, c.width})), rows);
    mirror.fetch();
  }
  Result want(c, quantise);
  std::vector<std::int32_t> own(at(c.rows));
  for (std::int64_t r = 0; r < c.rows; ++r) own[at(r)] = static_cast<std::int32_t>(r);
  gather_reference({.slots = 1,
                    .quantise = quantise.quantise,
                    .scale_upper_bound = quantise.scale_upper_bound,
                    .power_of_two_scales = quantise.power_of_two_scales},
                   {.hidden = view(wide.data(), {c.rows, c.width}),
                    .permutation = view(own.data(), {c.rows}),
                    .rows = view(&count, {1})},
                   want.out(c), want.scale(c, quantise));
  EXPECT_TRUE(got.values == want.values);
  EXPECT_EQ(got.scales, want.scales);
}

class QuantisedActivateOn : public testing::TestWithParam<test::Engine> {};

TEST_P(QuantisedActivateOn, EqualsTheReference) {
  const QuantiseSpec all[] = {
      {.quantise = Quantise::row},
      {.quantise = Quantise::block_128},
      {.quantise = Quantise::row, .scale_upper_bound = 0.02F},
      {.quantise = Quantise::block_128, .power_of_two_scales = true},
  };
  const Case cases[] = {
      {},
      {.rows = 70, .width = 768},
      {.rows = 5, .width = 1, .gap = 3},
      {.rows = 5, .width = 130},
      {.rows = 9, .width = 127, .gap = 1},
      {.rows = 4, .width = 2880, .gate = DType::f16, .up = DType::f16},
      {.rows = 4, .width = 2048, .gap = 4, .gate = DType::f32, .up = DType::f32},
      {.rows = 3, .width = 640, .gate = DType::f32, .up = DType::bf16},
      {.rows = 3, .width = 4100, .columns_first = true},
      {.rows = 2, .width = 14336},
      {.rows = 2, .width = 9001, .gate = DType::f16, .up = DType::f32, .columns_first = true},
  };
  for (const Case& c : cases) {
    for (const QuantiseSpec& quantise : all) {
      const auto rows = static_cast<std::int32_t>(c.rows);
      check(GetParam(), c, {}, quantise, rows);
      if (HasFailure()) return;
    }
    check(GetParam(), c, {.kind = Activation::relu2, .gated = false}, all[0], 2);
    check(GetParam(), c, {.alpha = 1.702F, .limit = 7, .up_offset = 1}, all[1], 1);
    if (HasFailure()) return;
  }
}

TEST_P(QuantisedActivateOn, EveryRule) {
  for (const bool gated : {true, false}) {
    for (int kind = 0; kind <= 6; ++kind) {
      check(GetParam(), {.rows = 2, .width = 300},
            {.kind = static_cast<Activation>(kind), .gated = gated}, {.quantise = Quantise::row},
            2);
    }
  }
}

// NaN stays NaN and moves no scale; infinities become 448; a row of zeros has a scale that is a
// normal number.
TEST_P(QuantisedActivateOn, WhatIsNoNumber) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const float up[8] = {2, std::numeric_limits<float>::quiet_NaN(), infinity, 1, 0, 0, 0, 0};
  std::uint8_t out[8] = {};
  float scales[2] = {};
  const Context context = test::context_of(GetParam(), 1);
  test::Mirror mirror(context);
  activate(context, {.kind = Activation::identity, .gated = false}, {.quantise = Quantise::row}, {},
           mirror.in(view(up, {2, 4})), mirror.out(view(out, DType::f8_e4m3, {2, 4})),
           mirror.out(view(scales, {2})));
  mirror.fetch();
  EXPECT_EQ(scales[0], 2.0F / 448);
  EXPECT_EQ(scales[1], 1e-12F / 448);
  const std::uint8_t want[8] = {0x7e, 0x7f, 0x7e, 0x76, 0, 0, 0, 0};
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(out[i], want[i]) << i;
}

INSTANTIATE_TEST_SUITE_P(All, QuantisedActivateOn, testing::ValuesIn(test::all_engines()),
                         [](const auto& set) { return test::engine_name(set.param); });

TEST(QuantisedActivate, NoRowsAndNoColumnsAreLegal) {
  const Context context = test::engine();
  float none[5] = {}, scales[5] = {};
  test::Mirror mirror(context);
  const auto run = [&](std::int64_t rows, std::int64_t width, Quantise by) {
    const Tensor x = mirror.in(view(none, {rows, width}));
    activate(context, {}, {.quantise = by}, x, x,
             mirror.out(view(none, DType::f8_e4m3, {rows, width})),
             mirror.out(by == Quantise::row ? view(scales, {rows})
                                            : view(scales, {rows, (width + 127) / 128})));
  };
  for (const Quantise by : {Quantise::row, Quantise::block_128}) {
    run(0, 5, by);
    run(5, 0, by);
  }
  EXPECT_NO_THROW(context.synchronize());
}

TEST(QuantisedActivate, RefusesWhatDoesNotFitByName) {
  const Context context = cpu({.threads = 1});
  std::vector<float> data(12), scales(12);
  std::vector<std::uint8_t> bytes(12);
  const Tensor x = view(data.data(), {3, 4}), out = view(bytes.data(), DType::f8_e4m3, {3, 4});
  const auto refused = [&](const QuantiseSpec& quantise, Tensor to, Tensor of_rows,
                           const char* words) {
    try {
      activate(context, {}, quantise, x, x, to, of_rows);
      ADD_FAILURE() << "accepted: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  const QuantiseSpec row{.quantise = Quantise::row}, block{.quantise = Quantise::block_128};
  const Tensor three = view(scales.data(), {3}), blocks = view(scales.data(), {3, 1});
  refused({}, out, three, "quantise is 0 (none): must be 1 (row) or 2 (block_128)");
  refused({.quantise = static_cast<Quantise>(3)}, out, three, "quantise is 3");
  refused({.quantise = Quantise::row, .scale_upper_bound = -1}, out, three, "scale_upper_bound");
  refused(row, x, three, "out");
  refused(row, out, {}, "scales is missing");
  refused(row, out, blocks, "scales");
  refused(block, out, three, "scales");
  refused(row, view(bytes.data(), DType::f8_e4m3, {4, 3}), three, "out");
  refused(row, view(data.data(), DType::f8_e4m3, {3, 4}), three,
          "activate: out overlaps gate: must lie apart");
  const char* const of_out = "activate: scales overlaps out: must lie apart";
  refused(row, out, view(reinterpret_cast<float*>(bytes.data()), {3}), of_out);
  refused(row, out, view(data.data() + 4, {3}), "activate: scales overlaps gate: must lie apart");
  // A block's scale for every row, rows first: no row of those is dense.
  std::vector<float> wide(3 * 256), shared(12);
  std::vector<std::uint8_t> rounded(3 * 256);
  const Tensor y = view(wide.data(), {3, 256});
  Tensor turned = view(shared.data(), {2, 6}).transposed().rows(0, 3);
  const Tensor over = view(rounded.data(), DType::f8_e4m3, {3, 256});
  EXPECT_NO_THROW(activate(context, {}, block, y, y, over, turned));
  turned.data = rounded.data() + 720;
  EXPECT_THROW(activate(context, {}, block, y, y, over, turned), Error);
  Tensor same = three;
  same.strides[0] = 0;
  refused(row, out, same, "activate: scales has strides 0: its elements must not overlap");
}

}  // namespace
}  // namespace shunt
