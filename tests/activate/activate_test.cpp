#include "shunt/activate.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "activate/cpu_engine.hpp"
#include "activate/reference.hpp"
#include "core/convert.hpp"
#include "engines.hpp"
#include "shunt/error.hpp"

namespace shunt {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

std::vector<ActivationSpec> all_forms() {
  std::vector<ActivationSpec> forms;
  for (const bool gated : {true, false}) {
    for (int kind = 0; kind <= 6; ++kind) {
      forms.push_back({.kind = static_cast<Activation>(kind), .gated = gated});
    }
    forms.push_back({.gated = gated, .limit = 2.5F, .limit_on = LimitOn::output});
  }
  forms.push_back({.alpha = 1.702F, .limit = 7, .up_offset = 1});  // gpt-oss
  forms.push_back({.limit = 1.25F});
  forms.push_back({.kind = Activation::gelu, .limit = 3, .up_offset = -0.5F});
  forms.push_back({.kind = Activation::situ, .beta = 4, .linear_beta = 25});  // Kimi K3
  forms.push_back({.kind = Activation::situ, .beta = 0.3F, .linear_beta = 1e-3F});
  forms.push_back(
      {.kind = Activation::situ, .limit = 2, .up_offset = 1, .beta = 4, .linear_beta = 3});
  return forms;
}

std::vector<float> interesting_values() {
  std::vector<float> values = {0,   -0.0F, 1e-30F, -1e-30F, 1e-5F, -1e-5F, 0.5F,   -0.5F, 1,
                               -1,  2.5F,  -2.5F,  7,       -7,    88,     -88,    89,    -89,
                               104, -104,  1e4F,   -1e4F,   1e18F, -1e18F, 1e-44F, 200,   -200};
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 3);
  for (int i = 0; i < 4000; ++i) values.push_back(normal(random));
  for (float x = -12; x <= 12; x += 0.0103F) values.push_back(x);
  return values;
}

class ActivateOn : public testing::TestWithParam<test::Engine> {};

// One row of f32 by an instruction set's own kernel, or by the GPU.
void activate_row(const test::Engine& engine, const ActivationSpec& spec,
                  const std::vector<float>& gate, const std::vector<float>& up,
                  std::vector<float>& out) {
  if (!engine.gpu) {
    cpu_engine::activate_kernels(engine.isa)
        .row(cpu_engine::activation_rule(spec), gate.data(), cpu_engine::Form::f32, up.data(),
             cpu_engine::Form::f32, out.data(), cpu_engine::Form::f32, out.size());
    return;
  }
  const Context context = test::context_of(engine, 1);
  test::Mirror mirror(context);
  const auto row = [](const std::vector<float>& data) {
    return view(data.data(), {1, static_cast<std::int64_t>(data.size())});
  };
  activate(context, spec, spec.gated ? mirror.in(row(gate)) : Tensor{}, mirror.in(row(up)),
           mirror.out(row(out)));
  mirror.fetch();
}

// The exponent that act takes: its rounding is a relative error of the result.
double exponent(const ActivationSpec& spec, double x) {
  switch (spec.kind) {
    case Activation::silu:
      return std::abs(static_cast<double>(spec.alpha) * x);
    case Activation::gelu:
      return x * x / 2;
    case Activation::gelu_tanh:
      return std::abs(1.6 * x + 0.0714 * x * x * x);
    case Activation::situ:
      return std::abs(x);
    default:
      return 0;
  }
}

// The bound: act() within 6 + 2 |exponent| half units of the last place (as long as e^-exponent is
// a normal number), the product with up adds two roundings. A tanh and its argument are 10 more, of
// what it is multiplied with.
TEST_P(ActivateOn, AgreesWithTheReference) {
  const std::vector<float> gate = interesting_values();
  std::vector<float> up(gate.rbegin(), gate.rend());
  std::vector<float> out(gate.size());
  for (const ActivationSpec& spec : all_forms()) {
    activate_row(GetParam(), spec, gate, up, out);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto g = static_cast<double>(gate[i]), u = static_cast<double>(up[i]);
      const double want = activate_reference(spec, g, u);
      ActivationSpec alone = spec;
      alone.gated = false;
      alone.up_offset = alone.linear_beta = 0;
      const double act = activate_reference(alone, 0, spec.gated ? g : u);
      const double factor = spec.gated && act != 0 ? std::abs(want / act) : 1;
      const double x = std::min(spec.gated ? g : u, spec.limit > 0 ? 100.0 : 1e30);
      const double tanh_units = spec.kind == Activation::situ ? 10 : 0;
      const double units = 6 + tanh_units + 2 * std::min(exponent(spec, x), 100.0);
      // Before an offset joins it.
      const double bent =
          spec.linear_beta > 0 ? std::abs(act) * static_cast<double>(spec.linear_beta) : 0;
      const double bound = (units * std::abs(act) * 0x1p-24 + 1e-36) * factor +
                           2 * std::abs(want) * 0x1p-24 +
                           tanh_units * std::min(bent, std::abs(act * u)) * 0x1p-24 + 1e-36;
      if (std::abs(want) > 3.4e38) {
        EXPECT_TRUE(std::isinf(out[i]) || std::abs(out[i]) > 3.3e38F);
      } else {
        ASSERT_NEAR(static_cast<double>(out[i]), want, bound)
            << describe(spec) << " gate " << gate[i] << " up " << up[i];
      }
    }
  }
}

// The same value whatever its place in the row: in a full vector or in the tail.
TEST_P(ActivateOn, TailsAreLikeFullVectors) {
  SHUNT_ON_CPU_ONLY();
  const cpu_engine::ActivateKernels& kernels = cpu_engine::activate_kernels(GetParam().isa);
  const std::vector<float> x = interesting_values();
  for (const ActivationSpec& spec : all_forms()) {
    const auto rule = cpu_engine::activation_rule(spec);
    std::vector<float> whole(64), part(64);
    kernels.row(rule, x.data() + 50, cpu_engine::Form::f32, x.data() + 500, cpu_engine::Form::f32,
                whole.data(), cpu_engine::Form::f32, 64);
    for (std::size_t n = 0; n < 40; ++n) {
      std::fill(part.begin(), part.end(), 77.0F);
      kernels.row(rule, x.data() + 50, cpu_engine::Form::f32, x.data() + 500, cpu_engine::Form::f32,
                  part.data(), cpu_engine::Form::f32, n);
      for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(part[i], i < n ? whole[i] : 77.0F);
    }
  }
}

// A GEMM's epilogue gives what the row kernel gives, bit for bit.
TEST_P(ActivateOn, TileIsTheRowKernel) {
  SHUNT_ON_CPU_ONLY();
  const cpu_engine::ActivateKernels& kernels = cpu_engine::activate_kernels(GetParam().isa);
  const std::vector<float> x = interesting_values();
  for (const ActivationSpec& spec : all_forms()) {
    const auto rule = cpu_engine::activation_rule(spec);
    const std::size_t most = spec.gated ? 32 : 64;
    for (const std::size_t columns :
         {std::size_t{1}, std::size_t{15}, std::size_t{16}, std::size_t{31}, most}) {
      alignas(64) float sums[3 * 64];
      std::copy_n(x.begin() + 100, 3 * 64, sums);
      std::vector<std::uint16_t> out(3 * 100, 0xdead), want(3 * 100, 0xdead);
      void* rows[3];
      for (std::size_t r = 0; r < 3; ++r) {
        rows[r] = out.data() + 100 * r;
        std::vector<float> gate(columns), up(columns);
        for (std::size_t i = 0; i < columns; ++i) {
          const float* row = sums + 64 * r;
          gate[i] = row[i / 16 * 32 % 64 + i % 16];
          up[i] = spec.gated ? row[i / 16 * 32 + 16 + i % 16] : row[i];
        }
        kernels.row(rule, gate.data(), cpu_engine::Form::f32, up.data(), cpu_engine::Form::f32,
                    want.data() + 100 * r + 7, cpu_engine::Form::bf16, columns);
      }
      kernels.tile(rule, sums, 3, rows, cpu_engine::Form::bf16, 7, columns);
      EXPECT_EQ(out, want) << describe(spec) << " " << columns;
    }
  }
}

TEST_P(ActivateOn, NanComesThroughAndInfinityMeansItsLimit) {
  const auto one = [&](const ActivationSpec& spec, float gate, float up) {
    std::vector<float> out(1);
    activate_row(GetParam(), spec, {gate}, {up}, out);
    return out[0];
  };
  for (const ActivationSpec& spec : all_forms()) {
    EXPECT_TRUE(std::isnan(one(spec, nan, nan))) << describe(spec);
    if (spec.gated) {
      EXPECT_TRUE(std::isnan(one(spec, nan, 1))) << describe(spec);
      EXPECT_TRUE(std::isnan(one(spec, 1, nan))) << describe(spec);
    }
  }
  EXPECT_EQ(one({}, infinity, 2), infinity);
  EXPECT_EQ(one({.kind = Activation::gelu}, infinity, 2), infinity);
  EXPECT_EQ(one({.limit = 7}, infinity, infinity), one({.limit = 7}, 7, 7));
  EXPECT_EQ(one({.kind = Activation::relu, .gated = false}, 0, -infinity), 0.0F);
}

TEST_P(ActivateOn, EveryDtypeIsRoundedOnceAndF16Saturates) {
  const Context context = test::context_of(GetParam(), 2);
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 2);
  const std::int64_t rows = 5, width = 37, stride = 50;
  for (const DType in : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType to : {DType::f32, DType::bf16, DType::f16}) {
      std::vector<std::uint32_t> gate(rows * stride), up(rows * stride), out(rows * stride);
      for (std::int64_t i = 0; i < rows * stride; ++i) {
        store_f32(gate.data(), in, i, normal(random));
        store_f32(up.data(), in, i, normal(random));
      }
      const auto tensor = [&](std::vector<std::uint32_t>& data, DType dtype) {
        Tensor t = view(data.data(), dtype, {rows, width});
        t.strides[0] = stride;
        return t;
      };
      const ActivationSpec spec{.alpha = 1.702F, .limit = 7, .up_offset = 1};
      test::Mirror mirror(context);
      activate(context, spec, mirror.in(tensor(gate, in)), mirror.in(tensor(up, in)),
               mirror.out(tensor(out, to)));
      mirror.fetch();
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < width; ++i) {
          const std::int64_t at = r * stride + i;
          const double want =
              activate_reference(spec, static_cast<double>(load_f32(gate.data(), in, at)),
                                 static_cast<double>(load_f32(up.data(), in, at)));
          const double unit = to == DType::f32    ? 0x1p-21
                              : to == DType::bf16 ? 0x1.01p-8
                                                  : 0x1.01p-11;
          EXPECT_NEAR(static_cast<double>(load_f32(out.data(), to, at)), want,
                      unit * std::abs(want) + 1e-7);
        }
      }
    }
  }
  float big[2] = {300, -300}, up[2] = {300, 300};
  std::uint16_t half[2];
  test::Mirror mirror(context);
  activate(context, {.kind = Activation::identity}, mirror.in(view(big, {1, 2})),
           mirror.in(view(up, {1, 2})), mirror.out(view(half, DType::f16, {1, 2})));
  mirror.fetch();
  EXPECT_EQ(half[0], 0x7bff);
  EXPECT_EQ(half[1], 0xfbff);
}

TEST_P(ActivateOn, SameBitsForAnyNumberOfThreadsAndInPlace) {
  const std::int64_t rows = 300, width = 211;
  std::vector<float> gate(rows * width), up(rows * width), first;
  std::mt19937 random(4);
  std::normal_distribution<float> normal(0, 2);
  for (float& x : gate) x = normal(random);
  for (float& x : up) x = normal(random);
  for (const int threads : {1, 2, 3, 4}) {
    std::vector<float> data = gate;
    const Context context = test::context_of(GetParam(), threads);
    test::Mirror mirror(context);
    const Tensor t = mirror.out(view(data.data(), {rows, width}));
    activate(context, {}, t, mirror.in(view(up.data(), {rows, width})), t);
    mirror.fetch();
    if (first.empty()) first = data;
    EXPECT_EQ(data, first);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ActivateOn, testing::ValuesIn(test::all_engines()),
                         [](const auto& set) { return test::engine_name(set.param); });

// The GPU computes the formulas of the vector sets, operation by operation.
TEST(Activate, TheGpuGivesTheBitsOfACpuWithFma) {
  if (!test::on_gpu()) GTEST_SKIP() << "about the CUDA engine";
  // Rows that are whole vectors, and others.
  for (const bool whole : {true, false}) {
    std::vector<float> gate = interesting_values();
    for (const float x : {infinity, -infinity, nan}) gate.push_back(x);
    while ((gate.size() % 8 == 0) != whole) gate.push_back(0.75F);
    const std::vector<float> up(gate.rbegin(), gate.rend());
    std::vector<float> ours(gate.size()), theirs(gate.size());
    for (const cpu_engine::Isa isa : test::all_isas()) {
      if (isa == cpu_engine::Isa::scalar) continue;
      for (const ActivationSpec& spec : all_forms()) {
        activate_row({.gpu = true}, spec, gate, up, ours);
        activate_row({.isa = isa}, spec, gate, up, theirs);
        for (std::size_t i = 0; i < gate.size(); ++i) {
          ASSERT_TRUE(ours[i] == theirs[i] || (std::isnan(ours[i]) && std::isnan(theirs[i])))
              << describe(spec) << " gate " << gate[i] << " up " << up[i] << ": " << ours[i] << ", "
              << theirs[i];
        }
      }
    }
  }
}

TEST(Activate, LeavesRowsPastTheCountAlone) {
  const Context context = test::engine(1);
  for (const std::int32_t count : {-5, 0, 2, 3, 9}) {
    std::vector<float> up(6, 2.0F), out(6, 9.0F);
    test::Mirror mirror(context);
    activate(context, {.kind = Activation::relu2, .gated = false}, {},
             mirror.in(view(up.data(), {3, 2})), mirror.out(view(out.data(), {3, 2})),
             mirror.in(view(&count, {1})));
    mirror.fetch();
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(out[static_cast<std::size_t>(i)], i / 2 < count ? 4 : 9) << count;
    }
  }
}

TEST(Activate, NoRowsAndNoColumnsAreLegal) {
  const Context context = test::engine();
  float none = 0;
  test::Mirror mirror(context);
  const Tensor no_rows = mirror.in(view(&none, {0, 5})),
               no_columns = mirror.in(view(&none, {5, 0}));
  activate(context, {}, no_rows, no_rows, no_rows);
  activate(context, {}, no_columns, no_columns, no_columns);
  EXPECT_NO_THROW(context.synchronize());
}

TEST(Activate, RefusesWhatDoesNotFitByName) {
  SHUNT_ON_CPU_ONLY();
  const Context context = cpu({.threads = 1});
  std::vector<float> data(12);
  const Tensor t = view(data.data(), {3, 4});
  const auto refused = [&](const ActivationSpec& spec, Tensor gate, Tensor up, Tensor out,
                           const char* word) {
    try {
      activate(context, spec, gate, up, out);
      ADD_FAILURE() << "accepted: " << word;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  refused({}, {}, t, t, "gate");
  refused({.gated = false}, t, t, t, "gate");
  refused({}, t, {}, t, "up");
  refused({}, view(data.data(), {3, 3}), t, t, "gate");
  refused({}, t, t, view(data.data(), {4, 3}), "out");
  refused({}, t, t, t.transposed(), "out");
  refused({}, view(data.data(), DType::i32, {3, 4}), t, t, "gate");
  Tensor overlapping = t;
  overlapping.strides[0] = 3;
  refused({}, t, t, overlapping, "activate: out has a row stride of 3: must be its width, 4");
  std::vector<float> more(24);
  const Tensor apart = view(more.data(), {3, 4}), shifted = view(more.data() + 4, {3, 4});
  refused({}, apart, t, shifted,
          "activate: out overlaps gate: must be the same view, or lie apart");
  refused({.gated = false}, {}, apart, view(more.data(), bf16, {3, 4}), "out overlaps up");
  // Halves of one matrix lie apart.
  Tensor left = view(more.data(), {3, 8}), right = left;
  left.shape[1] = right.shape[1] = 4;
  right.data = more.data() + 4;
  EXPECT_NO_THROW(activate(context, {}, left, t, right));
  EXPECT_NO_THROW(activate(context, {}, left, t, left));
  refused({.alpha = 0}, t, t, t, "alpha");
  refused({.kind = Activation::gelu, .alpha = 2}, t, t, t, "alpha");
  refused({.limit = -1}, t, t, t, "limit");
  refused({.limit = nan}, t, t, t, "limit");
  refused({.beta = 4}, t, t, t, "beta is 4: only situ");
  EXPECT_TRUE(supports(ActivationSpec{.beta = 0}, Device{}));  // what C leaves out
  refused({.kind = Activation::situ, .beta = 0}, t, t, t, "beta is 0: must be 1e-6 to 1e6");
  refused({.kind = Activation::situ, .beta = 2e6F}, t, t, t, "beta is 2000000");
  refused({.kind = Activation::situ, .beta = nan}, t, t, t, "beta is nan");
  refused({.linear_beta = 25}, t, t, t, "linear_beta is 25: only a gated situ");
  refused({.kind = Activation::situ, .gated = false, .linear_beta = 25}, {}, t, t, "linear_beta");
  refused({.kind = Activation::situ, .linear_beta = -1}, t, t, t, "linear_beta is -1");
  refused({.kind = static_cast<Activation>(17)}, t, t, t, "17");
}

}  // namespace
}  // namespace shunt
