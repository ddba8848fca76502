// Layers drawn at random: what supports() accepts gives what double precision gives, and the same
// bits again, on a GPU from a graph, and from a file; what it refuses, the constructor refuses.
//
// SHUNT_DRAWN=first:count takes other seeds than the few of every run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "checkpoint/temporary.hpp"
#include "core/convert.hpp"
#include "drawn.hpp"
#include "engine.hpp"
#include "layer/drawn_layer.hpp"
#include "layer/random_layer.hpp"
#include "layer/reference.hpp"
#include "layer/routing_reference.hpp"
#include "shunt/format.hpp"
#if SHUNT_CUDA_BUILT
#include "cuda/graph.hpp"
#endif

namespace shunt {
namespace {

using testing::DrawnLayer;
using testing::RandomLayer;
using testing::Routed;

// What a drawn layer is called with, and what it gives. Rows of hidden states, residual and output
// lie `gap` numbers apart.
class Call {
 public:
  Call(const DrawnLayer& drawn, RandomLayer& made, unsigned seed)
      : drawn_(drawn), random_(seed), valid_(static_cast<std::int32_t>(drawn.valid)) {
    const std::int64_t tokens = drawn.tokens;
    const RouteSpec& route = drawn.spec.route;
    in.hidden = spaced(made.hidden_states(tokens), drawn.hidden_dtype);
    if (drawn.residual) in.residual = spaced(made.hidden_states(tokens), drawn.hidden_dtype);
    if (drawn.valid >= 0) in.valid_tokens = view(&valid_, {1});
    if (route.hashed && drawn.routed != Routed::by_the_caller)
      in.token_ids = made.token_ids(tokens);
    if (drawn.routed == Routed::from_logits) {
      in.logits = matrix(tokens, route.columns(), 2, drawn.logits_dtype);
    }
    if (drawn.routed == Routed::by_the_caller) route_by_caller();
    output = spaced(matrix(tokens, drawn.spec.hidden, 1, DType::f32), drawn.output_dtype);
    ids.assign(static_cast<std::size_t>(tokens * route.top_k), -77);
    weights.assign(ids.size(), std::nanf(""));
  }

  using Forward = std::function<void()>;
  // `launch` has the layer's call made, or recorded and replayed.
  void forward(const Context& context, const Layer& layer,
               const std::function<void(const Forward&)>& launch) {
    const std::int64_t tokens = drawn_.tokens, k = drawn_.spec.route.top_k;
    const Buffer workspace = context.allocate(layer.workspace_bytes(tokens));
    const std::vector<unsigned char> garbage(workspace.bytes(), 0xff);
    context.copy(workspace.data(), garbage.data(), garbage.size());
    test::Mirror mirror(context);
    LayerOutputs out{.output = mirror.out(output)};
    if (!in.ids) {
      out.ids = mirror.out(view(ids.data(), {tokens, k}));
      out.weights = mirror.out(view(weights.data(), {tokens, k}));
    }
    mirror.poison();
    LayerInputs there;
    for (Tensor LayerInputs::*one :
         {&LayerInputs::hidden, &LayerInputs::token_ids, &LayerInputs::residual,
          &LayerInputs::valid_tokens, &LayerInputs::logits, &LayerInputs::ids,
          &LayerInputs::weights, &LayerInputs::expert_map}) {
      there.*one = mirror.in(in.*one);
    }
    launch([&] { layer.forward(there, out, workspace); });
    mirror.fetch();
  }

  // Every byte that the call wrote or left.
  std::vector<char> bits() const {
    std::vector<char> all = memory_.back();
    const auto add = [&](const auto& values) {
      const char* const begin = reinterpret_cast<const char*>(values.data());
      all.insert(all.end(), begin, begin + values.size() * sizeof(values[0]));
    };
    add(ids);
    add(weights);
    return all;
  }

  LayerInputs in;
  Tensor output;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;

 private:
  Tensor matrix(std::int64_t rows, std::int64_t columns, float deviation, DType dtype) {
    std::normal_distribution<float> normal(0, deviation);
    auto& data =
        memory_.emplace_back(static_cast<std::size_t>(rows * columns * shunt::bits(dtype) / 8));
    for (std::int64_t i = 0; i < rows * columns; ++i)
      store_f32(data.data(), dtype, i, normal(random_));
    return view(data.data(), dtype, {rows, columns});
  }
  // A copy whose rows are `gap` apart, with NaN between them.
  Tensor spaced(const Tensor& from, DType dtype) {
    const std::int64_t rows = from.shape[0], columns = from.shape[1], stride = columns + drawn_.gap;
    auto& data = memory_.emplace_back(
        static_cast<std::size_t>(rows * stride * shunt::bits(dtype) / 8), '\xff');
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      store_f32(data.data(), dtype, i / columns * stride + i % columns,
                load_f32(from.data, from.dtype, i));
    }
    Tensor to = view(data.data(), dtype, {rows, columns});
    to.strides[0] = stride;
    return to;
  }
  void route_by_caller() {
    const LayerSpec& spec = drawn_.spec;
    const std::int64_t slots = spec.route.slots();
    const int known =
        drawn_.mapped > 0 ? drawn_.mapped : spec.route.experts + spec.route.shared.count;
    std::uniform_int_distribution<std::int32_t> any(-1, known + 1);
    std::uniform_real_distribution<float> weight(-0.3f, 1);
    for (std::int64_t i = 0; i < drawn_.tokens * slots; ++i) {
      given_ids_.push_back(any(random_));
      given_weights_.push_back(weight(random_));
    }
    in.ids = view(given_ids_.data(), {drawn_.tokens, slots});
    in.weights = view(given_weights_.data(), {drawn_.tokens, slots});
    if (drawn_.mapped == 0) return;
    for (int g = 0; g < drawn_.mapped; ++g) map_.push_back(g < spec.experts.experts ? g : -1);
    std::shuffle(map_.begin(), map_.end(), random_);
    in.expert_map = view(map_.data(), {drawn_.mapped});
  }

  const DrawnLayer& drawn_;
  std::mt19937 random_;
  std::int32_t valid_;
  std::vector<std::int32_t> given_ids_, map_;
  std::vector<float> given_weights_;
  std::deque<std::vector<char>> memory_;
};

// Experts in a format, and what they hold.
class InFormat {
 public:
  InFormat(const FormatSpec& format, const LayerWeights& plain) : packed(plain), held(plain) {
    ExpertWeights& p = packed.experts;
    ExpertWeights& h = held.experts;
    for (const auto& [matrices, to, decoded] : {std::tuple{&p.gate, &p.packed_gate, &h.gate},
                                                {&p.up, &p.packed_up, &h.up},
                                                {&p.down, &p.packed_down, &h.down}}) {
      for (std::size_t e = 0; e < matrices->size(); ++e) {
        const Tensor& one = (*matrices)[e];
        memory_.push_back(
            cpu({.threads = 1}).allocate(packed_bytes(format, one.shape[0], one.shape[1])));
        to->push_back(pack(format, one, memory_.back()));
        auto& numbers = numbers_.emplace_back(static_cast<std::size_t>(one.elements()));
        (*decoded)[e] = view(numbers.data(), {one.shape[0], one.shape[1]});
        unpack(to->back(), (*decoded)[e]);
      }
      matrices->clear();
    }
  }
  LayerWeights packed, held;

 private:
  std::vector<Buffer> memory_;
  std::deque<std::vector<float>> numbers_;
};

// Ids and weights of every slot of a token, as the reference takes them.
struct Slots {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

// What the caller asked for.
Slots given(const LayerSpec& spec, const Call& call, std::int64_t t) {
  const std::int64_t slots = spec.route.slots();
  Slots of;
  for (std::int64_t i = t * slots; i < (t + 1) * slots; ++i) {
    const std::int32_t id = call.in.ids.as<std::int32_t>()[i];
    const Tensor& map = call.in.expert_map;
    const std::int64_t known = map ? map.shape[0] : spec.route.experts + spec.route.shared.count;
    const bool none = id < 0 || id >= known;
    of.ids.push_back(none ? -1 : map ? map.as<std::int32_t>()[id] : id);
    of.weights.push_back(call.in.weights.as<float>()[i]);
  }
  return of;
}

// What the layer chose, once it is seen to be as good as any choice, and with the weights that the
// rule gives it.
Slots routed(const LayerSpec& spec, const LayerWeights& weights, const Call& call, std::int64_t t) {
  const auto k = static_cast<std::size_t>(spec.route.top_k);
  const std::size_t begin = static_cast<std::size_t>(t) * k;
  const std::vector<int> ids(call.ids.begin() + static_cast<std::ptrdiff_t>(begin),
                             call.ids.begin() + static_cast<std::ptrdiff_t>(begin + k));
  std::vector<int> hashed;
  if (spec.route.hashed) {
    const std::int32_t token = call.in.token_ids.as<std::int32_t>()[t];
    const auto* const row = weights.hash_table[token].as<std::int32_t>();
    hashed.assign(row, row + k);
  }
  const auto reference = [&](const RouteSpec& rule, const std::vector<int>& of) {
    LayerSpec layer = spec;
    layer.route = rule;
    if (!call.in.logits) {
      return testing::routing_reference(
          layer, weights, router_input_reference(spec, weights, call.in.hidden.rows(t, t + 1)), of);
    }
    RouteReferenceInputs in{.logits = testing::numbers(call.in.logits[t]),
                            .router_bias = testing::numbers(weights.router_bias),
                            .selection_bias = testing::numbers(weights.selection_bias),
                            .per_expert_scale = testing::numbers(weights.per_expert_scale),
                            .hashed = of};
    return route_reference(rule, in);
  };
  const RouteReference best = reference(spec.route, hashed);
  RouteReference of_these = best;
  if (!std::equal(ids.begin(), ids.end(), best.ids.begin())) {
    // In f32 what is next to a tie may go either way; a choice of such is as good.
    for (std::size_t s = 0; s < k; ++s) {
      EXPECT_TRUE(ids[s] >= 0 && ids[s] < spec.route.experts) << ids[s];
      if (ids[s] < 0 || ids[s] >= spec.route.experts) return {};
      const double chosen = best.compared[static_cast<std::size_t>(ids[s])];
      const double wanted = best.compared[static_cast<std::size_t>(best.ids[s])];
      EXPECT_TRUE(std::abs(chosen - wanted) <= 0x1p-18 * std::max(1.0, std::abs(wanted)))
          << "slot " << s << ": " << ids[s] << " with " << chosen << " instead of " << best.ids[s]
          << " with " << wanted;
    }
    RouteSpec these = spec.route;
    these.hashed = true;
    if (these.score != Score::sparsemixer) of_these = reference(these, ids);
  }
  Slots of{ids, {}};
  for (std::size_t s = 0; s < of_these.weights.size(); ++s) {
    if (s >= k) of.ids.push_back(spec.route.experts + static_cast<int>(s - k));
    of.weights.push_back(s < k ? call.weights[begin + s] : static_cast<float>(of_these.weights[s]));
    if (s < k) {
      EXPECT_NEAR(static_cast<double>(call.weights[begin + s]), of_these.weights[s],
                  3e-5 * (std::abs(of_these.weights[s]) + static_cast<double>(spec.route.scale)))
          << "slot " << s;
    }
  }
  return of;
}

double length(const std::vector<double>& of) {
  double squares = 0;
  for (const double value : of) squares += value * value;
  return std::sqrt(squares);
}

// By how much of itself a number is off that meets a product, and of few numbers, which do not
// average out.
double rounding(const DrawnLayer& drawn) {
  const double one = drawn.options.rows != RowFormat::as_dtype ? 0x1p-5
                     : drawn.options.dtype == DType::bf16      ? 0x1p-8
                     : drawn.options.dtype == DType::f16       ? 0x1p-11
                                                               : 0x1p-20;
  const double out = drawn.output_dtype == DType::bf16  ? 0x1p-8
                     : drawn.output_dtype == DType::f16 ? 0x1p-11
                                                        : 0;
  const bool few = std::min(drawn.spec.experts.hidden, drawn.spec.experts.intermediate) < 32;
  return (few ? 12 : 4) * one + out;
}

void expect_right(const DrawnLayer& drawn, const LayerWeights& held, const Call& call) {
  const LayerSpec& spec = drawn.spec;
  const std::int64_t valid = drawn.valid < 0 ? drawn.tokens : drawn.valid;
  const std::int64_t k = spec.route.top_k;
  const double work = 3.0 * static_cast<double>(spec.experts.hidden * spec.experts.intermediate *
                                                spec.route.slots()) +
                      3.0 * static_cast<double>(spec.hidden * spec.shared.intermediate);
  const auto samples = std::clamp<std::int64_t>(static_cast<std::int64_t>(4e6 / work), 3, 60);
  for (std::int64_t t = 0; t < drawn.tokens; ++t) {
    SCOPED_TRACE("token " + std::to_string(t));
    std::vector<double> got(static_cast<std::size_t>(spec.hidden));
    for (std::size_t i = 0; i < got.size(); ++i) {
      got[i] = static_cast<double>(
          load_f32(call.output[t].data, drawn.output_dtype, static_cast<std::int64_t>(i)));
      if (std::isnan(got[i])) return ADD_FAILURE() << "NaN in column " << i;
    }
    if (t >= valid) {
      ASSERT_EQ(length(got), 0) << "past the valid tokens";
      for (std::int64_t s = t * k; s < (t + 1) * k && !call.in.ids; ++s) {
        ASSERT_EQ(call.ids[static_cast<std::size_t>(s)], -1);
        ASSERT_EQ(call.weights[static_cast<std::size_t>(s)], 0);
      }
      continue;
    }
    if (valid > samples && t % (valid / samples + 1) != 0 && t != valid - 1) continue;
    const Slots slots = call.in.ids ? given(spec, call, t) : routed(spec, held, call, t);
    if (slots.ids.empty()) return;
    const Tensor row = call.in.hidden.rows(t, t + 1);
    std::vector<double> spread;
    std::vector<double> want =
        layer_reference(spec, held, row, slots.ids.data(), slots.weights.data(), &spread);
    const double size = length(want) + length(spread);
    if (call.in.residual) {
      const Tensor residual = call.in.residual[t];
      for (std::size_t i = 0; i < want.size(); ++i)
        want[i] += static_cast<double>(
            load_f32(residual.data, residual.dtype, static_cast<std::int64_t>(i)));
    }
    std::vector<double> off = want;
    for (std::size_t i = 0; i < want.size(); ++i) off[i] = got[i] - want[i];
    ASSERT_LE(length(off), rounding(drawn) * (size + length(want)) + 1e-6) << "of " << size;
  }
}

bool check(unsigned seed) {
  const DrawnLayer drawn(seed);
  SCOPED_TRACE("seed " + std::to_string(seed) + ": " + drawn.text());
  const LayerSpec& spec = drawn.spec;
  const auto at_once = [](const Call::Forward& call) { call(); };
#if SHUNT_CUDA_BUILT
  std::optional<test::Stream> stream;
  if (test::on_gpu()) stream.emplace();
  const Context context =
      stream ? cuda({.stream = stream->get(), .dependent_launch = drawn.dependent_launch})
             : cpu({.threads = drawn.threads});
  const auto again = [&](const Call::Forward& call) {
    if (!stream) return call();
    context.synchronize();
    test::Graph(*stream, call).replay();
  };
#else
  const Context context = cpu({.threads = drawn.threads});
  const auto again = at_once;
#endif
  RandomLayer made(spec, seed);
  const Support support = supports(spec, drawn.options, context.device());
  if (!support) {
    EXPECT_THROW((void)Layer(spec, made.weights, context, drawn.options), Error);
    return false;
  }
  std::optional<InFormat> formatted;
  if (drawn.options.format != FormatSpec{}) formatted.emplace(drawn.options.format, made.weights);
  const LayerWeights& held = formatted ? formatted->held : made.weights;
  const LayerWeights& given = formatted && drawn.stored_packed ? formatted->packed : made.weights;
  const Layer layer(spec, given, context, drawn.options);
  Call call(drawn, made, seed + 1);
  call.forward(context, layer, at_once);
  const std::vector<char> first = call.bits();
  call.forward(context, layer, again);
  EXPECT_TRUE(call.bits() == first) << "again";
  if (seed % 3 == 0) {
    const test::TemporaryFolder folder;
    layer.save_prepared(folder / "layer.safetensors");
    call.forward(context, Layer::load_prepared(folder / "layer.safetensors", context), at_once);
    EXPECT_TRUE(call.bits() == first) << "saved and loaded";
  }
  expect_right(drawn, held, call);
  return true;
}

TEST(DrawnLayers, AreRightOrRefused) { test::each_seed(test::on_gpu() ? 400 : 120, check); }

}  // namespace
}  // namespace shunt
