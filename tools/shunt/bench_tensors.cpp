#include "bench_tensors.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core/convert.hpp"
#include "cuda/timing.hpp"

namespace shunt::tool {

namespace {

constexpr std::int64_t least_variants = 8, most_variants = 256;
constexpr double most_bytes = 16e9;
constexpr int draws = 8;

}  // namespace

std::int64_t variants_for(double bytes_of_a_call, std::int64_t rotate_bytes) {
  const double once = std::max(bytes_of_a_call, 1.0);
  const double wanted = std::clamp(std::ceil(static_cast<double>(rotate_bytes) / once),
                                   double{least_variants}, double{most_variants});
  return static_cast<std::int64_t>(std::max(std::min(wanted, std::floor(most_bytes / once)), 2.0));
}

void require(const Support& support) {
  if (!support) throw Error(Status::unsupported, support.reason);
}

void differs(const std::string& label, const std::string& how) {
  throw Error(Status::internal,
              fmt::format("{}: the result is not the CPU engine's: {}; not timed", label, how));
}

const Context& host() {
  static const Context context = cpu();
  return context;
}

Variants::Variants(const Context& context, DType dtype, std::vector<std::int64_t> shape,
                   std::int64_t count)
    : device_(context.device()), dtype_(dtype), shape_(std::move(shape)), count_(count) {
  std::int64_t elements = 1;
  for (const auto size : shape_) elements *= size;
  stride_ = std::max<std::int64_t>((bytes(dtype, elements) + 255) / 256 * 256, 256);
  memory_ = context.allocate(at(stride_ * count));
}

Tensor Variants::operator[](std::int64_t i) const {
  if (count_ == 0) return {};
  const char* data = static_cast<const char*>(memory_.data()) + stride_ * (i % count_);
  return shape_.size() == 1 ? view(data, dtype_, {shape_[0]}, device_)
                            : view(data, dtype_, {shape_[0], shape_[1]}, device_);
}

void fill(const Context& context, const Variants& tensors, float deviation, std::uint64_t seed) {
  for (std::int64_t i = 0; i < tensors.count(); ++i) {
    const Tensor out = tensors[i];
    const std::uint64_t own = seed * 1000003 + static_cast<std::uint64_t>(i);
    if (context.device().type == DeviceType::cuda) {
      cuda_engine::fill_normal(context, out, deviation, own);
      continue;
    }
    std::mt19937_64 random(own);
    std::normal_distribution<float> normal(0, deviation);
    for (std::int64_t j = 0; j < out.elements(); ++j) {
      store_f32(out.data, out.dtype, j, normal(random));
    }
  }
}

OnHost::OnHost(const Context& context, const Tensor& there) : tensor(there) {
  tensor.device = {};
  if (!there) return;
  memory = host().allocate(at(std::max<std::int64_t>(there.bytes(), 1)));
  tensor.data = memory.data();
  context.copy(tensor.data, there.data, at(there.bytes()));
}

float element(const Tensor& tensor, std::int64_t i) {
  return load_f32(tensor.data, tensor.dtype, i);
}

void put_element(const Tensor& tensor, std::int64_t i, float value) {
  store_f32(tensor.data, tensor.dtype, i, value);
}

void check_close(const std::string& label, const OnHost& got, const OnHost& want, float tolerance) {
  const std::int64_t width = got.tensor.shape[1];
  for (std::int64_t i = 0; i < got.tensor.elements(); ++i) {
    const float a = element(got.tensor, i), b = element(want.tensor, i);
    if (!(std::abs(a - b) <= tolerance * (0.1f + std::abs(b)))) {
      differs(label, fmt::format("row {}, column {} is {}, not {}", i / width, i % width, a, b));
    }
  }
}

Batches::Batches(const RouteSpec& route, Spread spread, std::int64_t tokens)
    : spec{.experts = route.experts, .slots = route.top_k} {
  RoutingSource source(route, spread, 1);
  const Buffer workspace = host().allocate(order_workspace_bytes(host(), spec, tokens));
  const std::int64_t pairs = tokens * spec.slots;
  for (int i = 0; i < draws; ++i) {
    ids.push_back(source.next(tokens));
    offsets.emplace_back(at(spec.experts + 1));
    permutation.emplace_back(at(pairs));
    inverse.emplace_back(at(pairs));
    order(host(), spec, {.ids = view(ids.back().data(), {tokens, spec.slots})},
          {.offsets = view(offsets.back().data(), {spec.experts + 1}),
           .permutation = view(permutation.back().data(), {pairs}),
           .inverse = view(inverse.back().data(), {tokens, spec.slots})},
          workspace);
  }
}

namespace {

// make(i, ids, out): copy i, on the host.
template <class Make>
void steer(const Context& context, const RouteSpec& route, Spread spread, const Variants& to,
           Make make) {
  if (spread == Spread::uniform) return;
  RoutingSource source(route, spread, 1);
  for (std::int64_t i = 0; i < to.count(); ++i) {
    const OnHost copy(context, to[i]);
    make(i, source.next(copy.tensor.shape[0]), copy.tensor);
    context.copy(to[i].data, copy.tensor.data, at(copy.tensor.bytes()));
  }
}

}  // namespace

void steer_logits(const Context& context, const RouteSpec& route, Spread spread,
                  const Variants& logits) {
  steer(context, route, spread, logits,
        [&](std::int64_t, const std::vector<std::int32_t>& ids, const Tensor& out) {
          logits_for(host(), ids, route.top_k, out);
        });
}

void steer_states(const Context& context, const RouteSpec& route, Spread spread,
                  const std::vector<std::vector<float>>& routers, const Variants& states) {
  steer(context, route, spread, states,
        [&](std::int64_t i, const std::vector<std::int32_t>& ids, const Tensor& out) {
          states_for(host(), routers[at(i) % routers.size()], ids, route.top_k, out);
        });
}

std::vector<float> floats_of(const Context& context, const Tensor& there) {
  const OnHost copy(context, there);
  std::vector<float> values(at(there.elements()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = element(copy.tensor, static_cast<std::int64_t>(i));
  }
  return values;
}

std::vector<std::vector<float>> routers_of(const Context& context, Spread spread,
                                           const Variants& routers) {
  std::vector<std::vector<float>> all;
  for (std::int64_t i = 0; spread != Spread::uniform && i < routers.count(); ++i) {
    all.push_back(floats_of(context, routers[i]));
  }
  return all;
}

void upload(const Context& context, const Variants& to,
            const std::vector<std::vector<std::int32_t>>& drawn) {
  for (std::int64_t i = 0; i < to.count(); ++i) {
    const auto& one = drawn[at(i) % drawn.size()];
    context.copy(to[i].data, one.data(), one.size() * sizeof(one[0]));
  }
}

}  // namespace shunt::tool
