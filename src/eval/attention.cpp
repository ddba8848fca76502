#include "eval/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/workspace.hpp"
#include "cpu/pool.hpp"
#include "shunt/gemm.hpp"

namespace shunt {

namespace {

// Of one block: queries and results by head, [heads, B, head_dim], and scores [heads, B, keys].
struct Scratch {
  float* queries = nullptr;
  float* scores = nullptr;
  float* sums = nullptr;
  std::int32_t* offsets = nullptr;  // [key_heads + 1] rows of each key head
  void* gemm = nullptr;
  std::size_t gemm_bytes = 0;
  std::size_t total = 0;
};

GroupedGemmSpec scores_spec(const DecoderSpec& spec, std::int64_t keys) {
  return {.groups = spec.key_heads, .n = keys, .k = spec.head_dim, .prepared = false};
}
GroupedGemmSpec values_spec(const DecoderSpec& spec, std::int64_t keys) {
  return {.groups = spec.key_heads, .n = spec.head_dim, .k = keys, .prepared = false};
}

Scratch carve(const Context& context, const DecoderSpec& spec, std::int64_t length,
              Workspace workspace) {
  const std::int64_t rows = spec.heads * std::min(length, attention_block);
  Scratch scratch;
  for (std::int64_t keys = 0; keys < length;) {
    keys = std::min(keys + attention_block, length);
    for (const GroupedGemmSpec& gemm : {scores_spec(spec, keys), values_spec(spec, keys)}) {
      scratch.gemm_bytes =
          std::max(scratch.gemm_bytes, grouped_gemm_workspace_bytes(context, gemm, rows));
    }
  }
  Carver carver(workspace);
  scratch.queries = carver.take<float>(rows * spec.head_dim);
  scratch.scores = carver.take<float>(rows * length);
  scratch.sums = carver.take<float>(rows * spec.head_dim);
  scratch.offsets = carver.take<std::int32_t>(spec.key_heads + 1);
  scratch.gemm = carver.take_bytes(scratch.gemm_bytes);
  scratch.total = carver.used();
  return scratch;
}

// Softmax of scores[0, keys) over positions [first, last]; 0 elsewhere.
void softmax(float* scores, std::int64_t keys, std::int64_t first, std::int64_t last, float scale) {
  float largest = -INFINITY;
  for (std::int64_t j = first; j <= last; ++j) largest = std::max(largest, scores[j]);
  double sum = 0;
  for (std::int64_t j = first; j <= last; ++j) {
    scores[j] = std::exp((scores[j] - largest) * scale);
    sum += static_cast<double>(scores[j]);
  }
  const auto factor = static_cast<float>(1 / sum);
  for (std::int64_t j = first; j <= last; ++j) scores[j] *= factor;
  std::fill(scores, scores + first, 0.0f);
  std::fill(scores + last + 1, scores + keys, 0.0f);
}

}  // namespace

std::size_t attention_workspace_bytes(const Context& context, const DecoderSpec& spec,
                                      std::int64_t length) {
  return carve(context, spec, length, {}).total;
}

void attention(const Context& context, const DecoderSpec& spec, std::int64_t length, const float* q,
               const float* k, const float* v, float* out, Workspace workspace) {
  const Scratch scratch = carve(context, spec, length, workspace);
  const std::int64_t d = spec.head_dim;
  const std::int64_t q_width = spec.heads * d;
  const std::int64_t k_width = spec.key_heads * d;
  const auto head_bytes = static_cast<std::size_t>(d) * sizeof(float);
  const float scale = 1 / std::sqrt(static_cast<float>(d));

  // k as [key_heads, length, d], v as [key_heads, d, length].
  Tensor key_matrices = view(k, {spec.key_heads, length, d});
  key_matrices.strides = {d, k_width, 1};
  Tensor value_matrices = view(v, {spec.key_heads, d, length});
  value_matrices.strides = {d, 1, k_width};

  for (std::int64_t begin = 0; begin < length; begin += attention_block) {
    const std::int64_t keys = std::min(begin + attention_block, length);
    const std::int64_t block = keys - begin;
    const std::int64_t rows = spec.heads * block;
    for (int g = 0; g <= spec.key_heads; ++g) {
      scratch.offsets[g] = static_cast<std::int32_t>(rows / spec.key_heads * g);
    }
    const Tensor offsets = view(scratch.offsets, {spec.key_heads + 1});
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t head = row / block, position = begin + row % block;
      std::memcpy(scratch.queries + row * d, q + position * q_width + head * d, head_bytes);
    }

    Tensor visible_keys = key_matrices;
    visible_keys.shape[1] = keys;
    const Tensor scores = view(scratch.scores, {rows, keys});
    grouped_gemm(
        context, scores_spec(spec, keys),
        {.rows = view(scratch.queries, {rows, d}), .offsets = offsets, .weights = visible_keys},
        scores, {scratch.gemm, scratch.gemm_bytes});

    context.pool().split(rows, 8, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t row = from; row < to; ++row) {
        const std::int64_t position = begin + row % block;
        const std::int64_t first =
            spec.sliding_window > 0 ? std::max<std::int64_t>(0, position + 1 - spec.sliding_window)
                                    : 0;
        softmax(scratch.scores + row * keys, keys, first, position, scale);
      }
    });

    Tensor visible_values = value_matrices;
    visible_values.shape[2] = keys;
    grouped_gemm(context, values_spec(spec, keys),
                 {.rows = scores, .offsets = offsets, .weights = visible_values},
                 view(scratch.sums, {rows, d}), {scratch.gemm, scratch.gemm_bytes});
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t head = row / block, position = begin + row % block;
      std::memcpy(out + position * q_width + head * d, scratch.sums + row * d, head_bytes);
    }
  }
}

}  // namespace shunt
