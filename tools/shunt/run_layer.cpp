#include "run_layer.hpp"

#include <algorithm>
#include <chrono>

#include "cost.hpp"
#include "cuda/timing.hpp"
#include "measure.hpp"

namespace shunt::tool {

namespace {

bool on_gpu(const Context& context) { return context.device().type == DeviceType::cuda; }

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Samples {
  std::string stage;
  Cost cost;
  std::vector<double> us;
};

StageResult summarise(const Samples& samples) {
  return {.stage = samples.stage,
          .us = median(samples.us),
          .us_min = *std::min_element(samples.us.begin(), samples.us.end()),
          .us_max = *std::max_element(samples.us.begin(), samples.us.end()),
          .bytes = samples.cost.bytes,
          .flops = samples.cost.flops};
}

void add(std::vector<Samples>& stages, const std::vector<StageTime>& times) {
  for (std::size_t s = 0; s < times.size(); ++s) {
    if (stages.size() <= s) {
      stages.push_back(
          {.stage = times[s].stage,
           .cost = {static_cast<double>(times[s].bytes), static_cast<double>(times[s].flops)},
           .us = {}});
    }
    stages[s].us.push_back(times[s].seconds * 1e6);
  }
}

Cost cost_of(const Layer& layer, const LayerInputs& in, const LayerResult& result) {
  const LayerSpec& spec = layer.spec();
  std::int64_t hit = 0;
  std::int64_t pairs = 0;
  for (int e = 0; e < spec.route.experts - spec.zero_experts; ++e) {
    const auto load = result.load[static_cast<std::size_t>(e)];
    hit += load > 0 ? 1 : 0;
    pairs += load;
  }
  hit += spec.route.shared.count;
  pairs += spec.route.shared.count * result.tokens;
  return layer_cost(spec, layer.options().dtype, in.hidden.dtype, result.tokens, hit, pairs);
}

// Rounds of calls between measurements of the ceilings, until the times are worth a median.
void time_on_cpu(const Layer& layer, const Context& context, const Pass& pass, Workspace workspace,
                 LayerResult& result) {
  constexpr int rounds = 5;
  constexpr double round_seconds = 0.015;
  constexpr double enough_seconds = 1;
  const DType dtype = layer.options().dtype;
  Samples whole{.stage = "layer", .cost = cost_of(layer, pass.in(), result), .us = {}};
  std::vector<Samples> stages;
  double spent = 0;
  Ceilings& best = result.ceilings;
  best = measure_ceilings(context, dtype);
  for (int round = 0; round < rounds && spent < enough_seconds; ++round) {
    double round_spent = 0;
    while (round_spent < round_seconds) {
      const double call = seconds_of([&] { layer.forward(pass.in(), pass.out(), workspace); });
      std::vector<StageTime> times;
      round_spent +=
          call + seconds_of([&] { layer.forward_timed(pass.in(), pass.out(), workspace, times); });
      whole.us.push_back(call * 1e6);
      add(stages, times);
    }
    spent += round_spent;
    best = better(best, measure_ceilings(context, dtype));
  }
  for (const auto& samples : stages) result.stages.push_back(summarise(samples));
  result.whole = summarise(whole);
}

// Stages between events; the whole in a CUDA graph of calls.
void time_on_gpu(const Layer& layer, const Context& context, const Pass& pass, Workspace workspace,
                 LayerResult& result) {
  constexpr int calls = 15;
  const bool tensor_cores = layer.options().dtype != DType::f32;
  std::vector<Samples> stages;
  for (int i = 0; i < calls; ++i) {
    std::vector<StageTime> times;
    layer.forward_timed(pass.in(), pass.out(), workspace, times);
    add(stages, times);
  }
  for (const auto& samples : stages) {
    result.stages.push_back(summarise(samples));
    result.stages.back().on_tensor_cores = tensor_cores && samples.stage.rfind("route", 0) != 0;
  }
  const cuda_engine::GraphTimes times = cuda_engine::time_in_graph(
      context, [&](std::int64_t) { layer.forward(pass.in(), pass.out(), workspace); },
      {.rotations = 1, .calls = 16, .seconds = 0.05});
  const Cost cost = cost_of(layer, pass.in(), result);
  result.whole = {.stage = "layer",
                  .us = times.us,
                  .us_min = times.us_min,
                  .us_max = times.us_max,
                  .bytes = cost.bytes,
                  .flops = cost.flops,
                  .on_tensor_cores = tensor_cores};
}

}  // namespace

Pass::Pass(const Context& context, const LayerSpec& spec, const Tensor& hidden,
           const Tensor& token_ids)
    : context_(context) {
  const std::int64_t tokens = hidden.shape[0], k = spec.route.top_k;
  in_.hidden = placed(hidden);
  if (token_ids) in_.token_ids = placed(token_ids);
  out_.output = room(DType::f32, tokens, spec.hidden, output_);
  out_.ids = room(DType::i32, tokens, k, ids_);
  out_.weights = room(DType::f32, tokens, k, weights_);
}

Tensor Pass::placed(const Tensor& host) {
  if (!on_gpu(context_)) return host;
  const auto bytes = static_cast<std::size_t>(host.bytes());
  memory_.push_back(context_.allocate(std::max<std::size_t>(bytes, 1)));
  context_.copy(memory_.back().data(), host.data, bytes);
  Tensor there = host;
  there.data = memory_.back().data();
  there.device = context_.device();
  return there;
}

// An empty tensor still wants an address.
Tensor Pass::room(DType dtype, std::int64_t rows, std::int64_t columns, Tensor& host) {
  const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(rows * columns, 1)) * 4;
  memory_.push_back(context_.allocate(bytes));
  const Tensor there = view(memory_.back().data(), dtype, {rows, columns}, context_.device());
  host = there;
  if (on_gpu(context_)) {
    memory_.push_back(cpu({.threads = 1}).allocate(bytes));
    host = view(memory_.back().data(), dtype, {rows, columns});
  }
  return there;
}

void Pass::fetch() {
  context_.synchronize();
  if (!on_gpu(context_)) return;
  for (const auto& [to, from] : {std::pair<const Tensor&, const Tensor&>{output_, out_.output},
                                 {ids_, out_.ids},
                                 {weights_, out_.weights}}) {
    context_.copy(to.data, from.data, static_cast<std::size_t>(from.bytes()));
  }
}

LayerResult run_layer(const Layer& layer, const Context& context, Pass& pass, int index,
                      bool timed) {
  LayerResult result;
  result.layer = index;
  result.tokens = pass.in().hidden.shape[0];
  const Buffer memory = context.allocate(layer.workspace_bytes(result.tokens));
  layer.forward(pass.in(), pass.out(), memory);
  pass.fetch();

  result.load.assign(static_cast<std::size_t>(layer.spec().route.experts), 0);
  for (std::int64_t i = 0; i < pass.ids().elements(); ++i) {
    const std::int32_t id = pass.ids().as<const std::int32_t>()[i];
    if (id >= 0 && id < layer.spec().route.experts) ++result.load[static_cast<std::size_t>(id)];
  }
  if (timed && result.tokens > 0) {
    (on_gpu(context) ? time_on_gpu : time_on_cpu)(layer, context, pass, memory, result);
  }
  return result;
}

}  // namespace shunt::tool
