#include "eval_speed.hpp"

#include <algorithm>
#include <chrono>

#include "core/convert.hpp"
#include "measure.hpp"

namespace shunt::tool {

namespace {

// Tokens at once, tokens of one sample when they come alone, and samples, of
// which the median counts. Tokens that come alone find their experts in memory, as those of a large
// model would: layers are repeated until they pass so many bytes.
constexpr std::size_t speed_bytes = std::size_t{1} << 29;
constexpr std::int64_t speed_batch = 512;
constexpr std::int64_t speed_alone = 128;
constexpr int speed_samples = 15;

}  // namespace

void EvalSpeed::sample(int layer, const Tensor& hidden) {
  std::vector<std::uint16_t>& rows = samples_[layer];
  const std::int64_t width = hidden.shape[1];
  for (std::int64_t i = 0; i < hidden.elements(); ++i) {
    if (static_cast<std::int64_t>(rows.size()) == speed_batch * width) return;
    rows.push_back(f32_to_bf16(hidden.as<const float>()[i]));
  }
}

void EvalSpeed::time(const Context& context, EvalRow& row) const {
  std::vector<std::vector<Layer>> copies;
  const auto add_copy = [&] {
    copies.emplace_back();
    std::size_t bytes = 0;
    for (const TimedLayer& timed : layers_) {
      copies.back().emplace_back(timed.spec, timed.layer.weights, context, timed.options);
      bytes += copies.back().back().prepared_bytes();
    }
    return bytes;
  };
  const std::size_t one = std::max<std::size_t>(1, add_copy());
  std::int64_t rows = speed_batch, hidden = 0;
  for (const TimedLayer& timed : layers_) {
    const std::int64_t width = timed.spec.hidden;
    rows = std::min(rows, static_cast<std::int64_t>(samples_.at(timed.index).size()) / width);
    hidden = std::max(hidden, width);
  }
  std::size_t workspace_bytes = 0;
  for (const Layer& layer : copies[0]) {
    workspace_bytes = std::max(workspace_bytes, layer.workspace_bytes(rows));
  }
  const Buffer workspace = context.allocate(workspace_bytes);
  std::vector<std::uint16_t> out(static_cast<std::size_t>(rows * hidden));
  const auto pass = [&](const std::vector<Layer>& layers, std::int64_t first, std::int64_t count) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const std::int64_t width = layers[i].spec().hidden;
      const std::uint16_t* const from = samples_.at(layers_[i].index).data() + first * width;
      layers[i].forward(view(from, DType::bf16, {count, width}),
                        view(out.data(), DType::bf16, {count, width}), workspace);
    }
  };
  const auto median_us = [&](std::int64_t tokens, const auto& sample) {
    std::vector<double> times;
    for (int n = -1; n < speed_samples; ++n) {  // the first touch is nobody's time
      const auto start = std::chrono::steady_clock::now();
      sample();
      const std::chrono::duration<double, std::micro> took =
          std::chrono::steady_clock::now() - start;
      if (n >= 0) times.push_back(took.count() / static_cast<double>(tokens));
    }
    return median(times);
  };
  row.batch_us = median_us(rows, [&] { pass(copies[0], 0, rows); });
  while (copies.size() * one < speed_bytes) add_copy();
  std::size_t next = 0;
  row.alone_us = median_us(speed_alone, [&] {
    for (std::int64_t i = 0; i < speed_alone; ++i, ++next) {
      pass(copies[next % copies.size()], static_cast<std::int64_t>(next) % rows, 1);
    }
  });
}

}  // namespace shunt::tool
