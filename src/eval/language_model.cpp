#include "eval/language_model.hpp"

#include <fmt/ranges.h>
#include <algorithm>
#include <chrono>
#include <cmath>

#include <cstring>

#include "checkpoint/access.hpp"
#include "checkpoint/tensor_store.hpp"
#include "core/check.hpp"
#include "core/convert.hpp"
#include "core/shape.hpp"
#include "core/workspace.hpp"
#include "cpu/pool.hpp"
#include "eval/attention.hpp"
#include "gemm/fused.hpp"

namespace shunt {

namespace {

using Floats = std::vector<float>;

Tensor weight_of(const Checkpoint& checkpoint, const std::string& name,
                 std::initializer_list<std::int64_t> shape) {
  const Tensor tensor = checkpoint.tensor(name);
  if (!has_shape(tensor, shape)) {
    fail(Status::bad_file, "{}: tensor '{}' is {}: config.json asks for [{}]", checkpoint.folder(),
         name, tensor.describe(), fmt::join(shape, ", "));
  }
  if (tensor.dtype != DType::f32 && tensor.dtype != DType::bf16 && tensor.dtype != DType::f16) {
    fail(Status::unsupported,
         "{}: tensor '{}' is {}: outside the experts only f32, bf16 and f16 "
         "are computed",
         checkpoint.folder(), name, tensor.describe());
  }
  return tensor;
}

// A bias that is not read and is not 0 all over: the model that was meant is another one.
void refuse_unread(const Checkpoint& checkpoint, const std::string& bias) {
  if (!checkpoint.contains(bias)) return;
  const Tensor tensor = checkpoint.tensor(bias);
  // Of another dtype than a float's the bytes tell.
  const std::int64_t count = is_float(tensor.dtype) ? tensor.elements() : tensor.bytes();
  for (std::int64_t i = 0; i < count; ++i) {
    const bool zero = is_float(tensor.dtype) ? load_f32(tensor.data, tensor.dtype, i) == 0
                                             : tensor.as<const char>()[i] == 0;
    if (zero) continue;
    fail(Status::bad_file, "{}: tensor '{}' is there: config.json says nothing of biases",
         CheckpointAccess::store(checkpoint).file_of(bias), bias);
  }
}

Floats floats(const Tensor& tensor) {
  Floats values(static_cast<std::size_t>(tensor.elements()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_f32(tensor.data, tensor.dtype, static_cast<std::int64_t>(i));
  }
  return values;
}

// y = W x + b over rows, W kept in f32 as the GEMM reads it.
class Linear {
 public:
  // Rows of all matrices behind one another, each [n, k]; `biases`, if any, one each.
  Linear(const Context& context, const std::vector<Tensor>& matrices,
         const std::vector<Tensor>& biases = {}) {
    const std::int64_t k = matrices[0].shape[1];
    Floats all;
    for (const Tensor& matrix : matrices) {
      const Floats values = floats(matrix);
      all.insert(all.end(), values.begin(), values.end());
    }
    for (const Tensor& bias : biases) {
      const Floats values = floats(bias);
      bias_.insert(bias_.end(), values.begin(), values.end());
    }
    const auto n = static_cast<std::int64_t>(all.size()) / k;
    memory_ = context.allocate(shunt::prepared_bytes(context, f32, 1, n, k));
    weights_ = prepare(context, f32, {view(all.data(), {n, k})}, memory_);
  }
  std::int64_t n() const { return weights_.n; }
  std::size_t workspace_bytes(const Context& context, std::int64_t rows) const {
    return mlp_workspace_bytes(context, weights_, rows);
  }
  void operator()(const Context& context, const float* x, std::int64_t rows, float* y,
                  Workspace workspace) const {
    mlp_gemm(context, weights_,
             {.rows = view(x, {rows, weights_.k}), .bias = bias_.empty() ? nullptr : bias_.data()},
             view(y, {rows, weights_.n}), workspace);
  }

 private:
  Buffer memory_;
  PreparedWeights weights_;
  Floats bias_;
};

void rms_norm(const float* x, const Floats& weight, float epsilon, float* y) {
  double squares = 0;
  for (std::size_t i = 0; i < weight.size(); ++i) {
    squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  const auto mean = static_cast<float>(squares / static_cast<double>(weight.size()));
  const float factor = 1 / std::sqrt(mean + epsilon);
  for (std::size_t i = 0; i < weight.size(); ++i) y[i] = weight[i] * (x[i] * factor);
}

// Element i of the first half turns with element i of the second.
void rotate(float* head, const float* cosine, const float* sine, std::int64_t half) {
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cosine[i] - b * sine[i];
    head[half + i] = b * cosine[i] + a * sine[i];
  }
}

struct Block {
  Floats input_norm, query_norm, key_norm, moe_norm;
  std::unique_ptr<Linear> qkv, out;
  std::unique_ptr<Layer> moe;
};

}  // namespace

struct LanguageModel::Impl {
  Impl(const Context& host_, const Context& engine_) : host(host_), engine(engine_) {}

  // Memory for `tokens` tokens, the longest sequence of `longest`.
  void reserve(std::int64_t tokens, std::int64_t longest);
  void run_moe(const Layer& layer, const float* x, float* y, std::int64_t tokens);
  void attend(const Block& block, std::span<const std::int64_t> lengths, std::int64_t tokens);

  Context host, engine;
  DecoderSpec spec;
  Floats embedding;
  Floats final_norm;
  std::vector<Block> blocks;
  std::unique_ptr<Linear> head;
  double moe_seconds = 0;

  std::int64_t room_tokens = 0, room_longest = 0;
  Floats x, normed, qkv, q, k, v, mixed, delta;  // a row a token
  Floats cosine, sine;                           // [longest, head_dim / 2]
  Buffer host_workspace, engine_workspace, engine_x, engine_y;
  std::size_t host_bytes = 0, engine_bytes = 0;
};

void LanguageModel::Impl::reserve(std::int64_t tokens, std::int64_t longest) {
  if (tokens <= room_tokens && longest <= room_longest) return;
  room_tokens = std::max(tokens, room_tokens);
  const auto rows = static_cast<std::size_t>(room_tokens);
  const auto hidden = static_cast<std::size_t>(spec.hidden);
  const auto q_width = static_cast<std::size_t>(spec.heads * spec.head_dim);
  const auto k_width = static_cast<std::size_t>(spec.key_heads * spec.head_dim);
  for (Floats* rows_of_hidden : {&x, &normed, &delta}) rows_of_hidden->resize(rows * hidden);
  qkv.resize(rows * (q_width + 2 * k_width));
  q.resize(rows * q_width);
  mixed.resize(rows * q_width);
  k.resize(rows * k_width);
  v.resize(rows * k_width);

  // As transformers: inverse frequencies and angles in f32.
  room_longest = std::max(longest, room_longest);
  const std::int64_t half = spec.head_dim / 2;
  cosine.resize(static_cast<std::size_t>(room_longest * half));
  sine.resize(cosine.size());
  for (std::int64_t i = 0; i < half; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(spec.head_dim);
    const float frequency = 1 / std::pow(spec.rope_theta, exponent);
    for (std::int64_t t = 0; t < room_longest; ++t) {
      const float angle = static_cast<float>(t) * frequency;
      cosine[static_cast<std::size_t>(t * half + i)] = std::cos(angle);
      sine[static_cast<std::size_t>(t * half + i)] = std::sin(angle);
    }
  }

  host_bytes = attention_workspace_bytes(host, spec, room_longest);
  host_bytes = std::max(host_bytes, head->workspace_bytes(host, room_tokens));
  engine_bytes = 0;
  for (const Block& block : blocks) {
    host_bytes = std::max({host_bytes, block.qkv->workspace_bytes(host, room_tokens),
                           block.out->workspace_bytes(host, room_tokens)});
    engine_bytes = std::max(engine_bytes, block.moe->workspace_bytes(room_tokens));
  }
  host_workspace = host.allocate(host_bytes);
  engine_workspace = engine.allocate(engine_bytes);
  if (engine.device().type != DeviceType::cpu) {
    engine_x = engine.allocate(rows * hidden * sizeof(float));
    engine_y = engine.allocate(rows * hidden * sizeof(float));
  }
}

void LanguageModel::Impl::run_moe(const Layer& layer, const float* from, float* to,
                                  std::int64_t tokens) {
  const bool here = engine.device().type == DeviceType::cpu;
  const auto bytes = static_cast<std::size_t>(tokens * spec.hidden) * sizeof(float);
  Tensor in = view(from, {tokens, spec.hidden}), out = view(to, {tokens, spec.hidden});
  if (!here) {
    in = view(engine_x.data(), f32, {tokens, spec.hidden}, engine.device());
    out = view(engine_y.data(), f32, {tokens, spec.hidden}, engine.device());
    engine.copy(engine_x.data(), from, bytes);
  }
  const auto start = std::chrono::steady_clock::now();
  layer.forward(in, out, engine_workspace);
  engine.synchronize();
  moe_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!here) engine.copy(to, engine_y.data(), bytes);
}

// delta = out_proj(attention(normed))
void LanguageModel::Impl::attend(const Block& block, std::span<const std::int64_t> lengths,
                                 std::int64_t tokens) {
  const std::int64_t d = spec.head_dim, half = d / 2;
  const std::int64_t q_width = spec.heads * d, k_width = spec.key_heads * d;
  const std::int64_t width = q_width + 2 * k_width;
  (*block.qkv)(host, normed.data(), tokens, qkv.data(), host_workspace);

  std::int64_t begin = 0;
  for (const std::int64_t length : lengths) {
    host.pool().split(length, 16, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t t = from; t < to; ++t) {
        float* const row = qkv.data() + (begin + t) * width;
        for (int h = 0; h < spec.heads + spec.key_heads; ++h) {
          float* const head_row = row + h * d;
          if (spec.head_norm) {
            const Floats& weight = h < spec.heads ? block.query_norm : block.key_norm;
            rms_norm(head_row, weight, spec.epsilon, head_row);
          }
          rotate(head_row, cosine.data() + t * half, sine.data() + t * half, half);
        }
        std::copy_n(row, q_width, q.data() + (begin + t) * q_width);
        std::copy_n(row + q_width, k_width, k.data() + (begin + t) * k_width);
        std::copy_n(row + q_width + k_width, k_width, v.data() + (begin + t) * k_width);
      }
    });
    attention(host, spec, length, q.data() + begin * q_width, k.data() + begin * k_width,
              v.data() + begin * k_width, mixed.data() + begin * q_width, host_workspace);
    begin += length;
  }
  (*block.out)(host, mixed.data(), tokens, delta.data(), host_workspace);
}

LanguageModel::LanguageModel(const Checkpoint& checkpoint, const Context& host,
                             const Context& engine, const LayerOptions& options,
                             const LayerMaker& make_layer)
    : impl_(std::make_unique<Impl>(host, engine)) {
  impl_->spec = decoder_spec(checkpoint);
  const DecoderSpec& spec = impl_->spec;
  const std::int64_t hidden = spec.hidden;
  const std::int64_t q_width = spec.heads * spec.head_dim;
  const std::int64_t k_width = spec.key_heads * spec.head_dim;
  const auto vector = [&](const std::string& name, std::int64_t size) {
    return weight_of(checkpoint, name, {size});
  };
  const auto matrix = [&](const std::string& name, std::int64_t n, std::int64_t k) {
    return weight_of(checkpoint, name, {n, k});
  };
  const Tensor embedding = matrix("model.embed_tokens.weight", spec.vocabulary, hidden);
  impl_->embedding = floats(embedding);
  impl_->final_norm = floats(vector("model.norm.weight", hidden));
  impl_->head = std::make_unique<Linear>(
      host, std::vector<Tensor>{spec.tied ? embedding
                                          : matrix("lm_head.weight", spec.vocabulary, hidden)});
  for (int i = 0; i < spec.layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}.", i);
    const std::string self = layer + "self_attn.";
    Block block;
    block.input_norm = floats(vector(layer + "input_layernorm.weight", hidden));
    block.moe_norm = floats(vector(layer + "post_attention_layernorm.weight", hidden));
    if (spec.head_norm) {
      block.query_norm = floats(vector(self + "q_norm.weight", spec.head_dim));
      block.key_norm = floats(vector(self + "k_norm.weight", spec.head_dim));
    }
    std::vector<Tensor> qkv_bias, out_bias;
    if (spec.qkv_bias) {
      qkv_bias = {vector(self + "q_proj.bias", q_width), vector(self + "k_proj.bias", k_width),
                  vector(self + "v_proj.bias", k_width)};
    } else {
      for (const char* matrix_name : {"q_proj", "k_proj", "v_proj"}) {
        refuse_unread(checkpoint, self + matrix_name + ".bias");
      }
    }
    if (spec.output_bias) {
      out_bias = {vector(self + "o_proj.bias", hidden)};
    } else {
      refuse_unread(checkpoint, self + "o_proj.bias");
    }
    block.qkv = std::make_unique<Linear>(
        host,
        std::vector<Tensor>{matrix(self + "q_proj.weight", q_width, hidden),
                            matrix(self + "k_proj.weight", k_width, hidden),
                            matrix(self + "v_proj.weight", k_width, hidden)},
        qkv_bias);
    block.out = std::make_unique<Linear>(
        host, std::vector<Tensor>{matrix(self + "o_proj.weight", hidden, q_width)}, out_bias);
    block.moe = make_layer ? std::make_unique<Layer>(make_layer(i))
                           : std::make_unique<Layer>(checkpoint, i, engine, options);
    impl_->blocks.push_back(std::move(block));
  }
}

LanguageModel::~LanguageModel() = default;
LanguageModel::LanguageModel(LanguageModel&&) noexcept = default;
LanguageModel& LanguageModel::operator=(LanguageModel&&) noexcept = default;

const DecoderSpec& LanguageModel::spec() const { return impl_->spec; }
double LanguageModel::moe_seconds() const { return impl_->moe_seconds; }
std::size_t LanguageModel::prepared_bytes() const {
  std::size_t total = 0;
  for (const Block& block : impl_->blocks) total += block.moe->prepared_bytes();
  return total;
}

void LanguageModel::forward(std::span<const std::int32_t> tokens,
                            std::span<const std::int64_t> lengths, std::span<float> logits,
                            const HiddenHook& hook) {
  Impl& m = *impl_;
  const DecoderSpec& spec = m.spec;
  const std::int64_t hidden = spec.hidden;
  const auto count = static_cast<std::int64_t>(tokens.size());
  std::int64_t sum = 0, longest = 0;
  for (const std::int64_t length : lengths) {
    if (length < 0) fail(Status::invalid_argument, "forward: a length is {}: must be >= 0", length);
    sum += length;
    longest = std::max(longest, length);
  }
  if (sum != count) {
    fail(Status::invalid_argument, "forward: lengths sum up to {}: must be the {} tokens", sum,
         count);
  }
  if (static_cast<std::int64_t>(logits.size()) != count * spec.vocabulary) {
    fail(Status::invalid_argument, "forward: logits hold {} values: must be {} x {}", logits.size(),
         count, spec.vocabulary);
  }
  for (const std::int32_t token : tokens) {
    if (token < 0 || token >= spec.vocabulary) {
      fail(Status::invalid_argument, "forward: token {}: must be 0 to {}", token,
           spec.vocabulary - 1);
    }
  }
  if (count == 0) return;
  m.reserve(count, longest);

  const auto norm = [&](const Floats& weight) {
    m.host.pool().split(count, 16, [&](std::int64_t from, std::int64_t to) {
      for (std::int64_t t = from; t < to; ++t) {
        rms_norm(m.x.data() + t * hidden, weight, spec.epsilon, m.normed.data() + t * hidden);
      }
    });
  };
  const auto add_delta = [&] {
    for (std::int64_t i = 0; i < count * hidden; ++i) {
      m.x[static_cast<std::size_t>(i)] += m.delta[static_cast<std::size_t>(i)];
    }
  };
  for (std::int64_t t = 0; t < count; ++t) {
    std::copy_n(m.embedding.data() + tokens[static_cast<std::size_t>(t)] * hidden, hidden,
                m.x.data() + t * hidden);
  }
  for (std::size_t i = 0; i < m.blocks.size(); ++i) {
    const Block& block = m.blocks[i];
    norm(block.input_norm);
    m.attend(block, lengths, count);
    add_delta();
    norm(block.moe_norm);
    if (hook) hook(static_cast<int>(i), view(m.normed.data(), {count, hidden}));
    m.run_moe(*block.moe, m.normed.data(), m.delta.data(), count);
    add_delta();
  }
  norm(m.final_norm);
  (*m.head)(m.host, m.normed.data(), count, logits.data(), m.host_workspace);
}

}  // namespace shunt
