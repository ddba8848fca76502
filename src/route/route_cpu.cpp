// The CPU engine of route. Rounds of tokens: first their logits, shared out over blocks of tokens
// and, where those are fewer than the threads, ranges of experts; then, after a barrier, a token at
// a time from logits to ids and weights. Who computes what changes no bit.
//
// Bytes: hidden states once, the router once for every block_rows tokens. Time: the dot products at
// the rate of FMA (many tokens) or of memory (one token), and some ns an expert and token for
// scores and selection.
#include <algorithm>

#include "core/workspace.hpp"
#include "cpu/pool.hpp"
#include "route/engine.hpp"

namespace shunt {

namespace {

using routing::Kernels;
using routing::RowOutputs;
using routing::Rows;
using routing::Rule;
using routing::Scratch;

const Kernels& kernels_for(cpu_engine::Isa isa) {
#if SHUNT_X86
  switch (isa) {
    case cpu_engine::Isa::scalar:
      return routing::scalar::kernels;
    case cpu_engine::Isa::avx2:
      return routing::avx2::kernels;
    case cpu_engine::Isa::avx512:
    case cpu_engine::Isa::avx512_bf16:
    case cpu_engine::Isa::amx_bf16:
      return routing::avx512::kernels;
  }
#endif
  static_cast<void>(isa);
  return routing::scalar::kernels;
}

Rows rows_of(const Tensor& tensor) {
  return {tensor.data, static_cast<routing::Form>(tensor.dtype), tensor.strides[0]};
}

// Tokens of one round: enough blocks for every thread, and logits that stay in the caches.
std::int64_t round_tokens(int threads, std::int64_t columns, std::int64_t tokens) {
  const std::int64_t block_bytes = routing::block_rows * routing::padded(columns) * 4;
  const std::int64_t blocks = std::clamp<std::int64_t>((1 << 20) / block_bytes, 1, 16);
  return std::min(tokens, routing::block_rows * blocks * threads);
}

// What one call carves from its workspace.
struct Plan {
  Plan(Carver& carver, int threads, const RouteSpec& spec, std::int64_t tokens,
       std::int64_t hidden) {
    const std::int64_t columns = spec.columns();
    stride = routing::padded(columns);
    router_bias = carver.take<float>(stride);
    selection_bias = carver.take<float>(stride);
    per_expert_scale = carver.take<float>(stride);
    // From logits a row a thread is enough, but what serves hidden states serves logits too.
    const std::int64_t rows = hidden > 0 ? round_tokens(threads, columns, tokens) : 0;
    logits = carver.take<float>(stride * std::max<std::int64_t>(rows, threads));
    scores = carver.take<float>(stride * threads);
    compared = carver.take<float>(stride * threads);
    keys = carver.take<std::int64_t>(stride * threads);
    best = carver.take<std::int64_t>(stride * threads);
  }

  std::int64_t stride;
  float* router_bias;
  float* selection_bias;
  float* per_expert_scale;
  float* logits;  // [tokens of a round, stride], or from logits [threads, stride]
  float* scores;
  float* compared;
  std::int64_t* keys;
  std::int64_t* best;
};

const float* widened(const Kernels& kernels, const Tensor& tensor, float* to) {
  if (!tensor) return nullptr;
  kernels.widen({tensor.data, static_cast<routing::Form>(tensor.dtype), 0}, 0, 0, tensor.shape[0],
                to);
  return to;
}

template <class T>
T* row_of(const Tensor& tensor, std::int64_t t) {
  return tensor.data == nullptr ? nullptr : tensor.as<T>() + t * tensor.strides[0];
}

class Engine {
 public:
  Engine(const Context& context, const RouteCall& call, Workspace workspace)
      : call_(call),
        kernels_(kernels_for(context.pool().isa())),
        threads_(context.threads()),
        valid_(valid_tokens(call)),
        carver_(workspace),
        plan_(carver_, threads_, call.spec, call.tokens, call.hidden),
        rule_(resolve(call.spec)) {
    rule_.router_bias = widened(kernels_, call.in.router_bias, plan_.router_bias);
    rule_.selection_bias = widened(kernels_, call.in.selection_bias, plan_.selection_bias);
    rule_.per_expert_scale = widened(kernels_, call.in.per_expert_scale, plan_.per_expert_scale);
  }

  void run(cpu_engine::Pool& pool) {
    // Waking the others costs more than this much work.
    const bool alone = threads_ == 1 || valid_ * rule_.columns * (call_.hidden + 64) < (1 << 17);
    if (alone) {
      work(Alone{});
    } else {
      pool.run([this](cpu_engine::Team& team) { work(team); });
    }
  }

 private:
  // A team of the caller only.
  struct Alone {
    static int index() { return 0; }
    static int threads() { return 1; }
    static void barrier() {}
    template <class Body>
    static void for_each(std::size_t tasks, Body&& body) {
      for (std::size_t i = 0; i < tasks; ++i) body(i);
    }
  };

  template <class Team>
  void work(Team&& team) const {
    const std::int64_t round = call_.hidden > 0
                                   ? round_tokens(threads_, rule_.columns, call_.tokens)
                                   : std::max<std::int64_t>(valid_, 1);
    for (std::int64_t first = 0; first < valid_; first += round) {
      const std::int64_t tokens = std::min(round, valid_ - first);
      if (call_.hidden > 0) {
        compute_logits(team, first, tokens);
        team.barrier();
      }
      const std::int64_t group = 4;
      const auto tasks = static_cast<std::size_t>((tokens + group - 1) / group);
      team.for_each(tasks, [&](std::size_t task) {
        const std::int64_t begin = static_cast<std::int64_t>(task) * group;
        for (std::int64_t t = begin; t < std::min(begin + group, tokens); ++t) {
          select(team.index(), first + t, t);
        }
      });
      // The next round writes where this one reads.
      if (call_.hidden > 0 && first + round < valid_) team.barrier();
    }
    if (team.index() == 0) clear(valid_);
  }

  template <class Team>
  void compute_logits(Team& team, std::int64_t first, std::int64_t tokens) const {
    const std::int64_t blocks = (tokens + routing::block_rows - 1) / routing::block_rows;
    const std::int64_t tiles = (rule_.columns + routing::tile_rows - 1) / routing::tile_rows;
    const std::int64_t ranges =
        std::clamp<std::int64_t>((team.threads() + blocks - 1) / blocks, 1, tiles);
    team.for_each(static_cast<std::size_t>(blocks * ranges), [&](std::size_t task) {
      const auto block = static_cast<std::int64_t>(task) / ranges;
      const auto range = static_cast<std::int64_t>(task) % ranges;
      // Blocks of equal size, so that threads finish together.
      const std::int64_t begin = tokens * block / blocks;
      const std::int64_t end = tokens * (block + 1) / blocks;
      const std::int64_t low = tiles * range / ranges * routing::tile_rows;
      const std::int64_t high =
          std::min<std::int64_t>(tiles * (range + 1) / ranges * routing::tile_rows, rule_.columns);
      kernels_.dots(rows_of(call_.in.hidden), first + begin, end - begin,
                    rows_of(call_.in.router_weight), low, high, call_.hidden,
                    plan_.logits + begin * plan_.stride, plan_.stride);
    });
  }

  // Token t of the call; `slot` is its place in this round.
  void select(int thread, std::int64_t t, std::int64_t slot) const {
    const std::int64_t offset = plan_.stride * thread;
    Scratch scratch{plan_.logits + plan_.stride * (call_.hidden > 0 ? slot : thread),
                    plan_.scores + offset, plan_.compared + offset, plan_.keys + offset,
                    plan_.best + offset};
    if (call_.hidden == 0) {
      kernels_.widen(rows_of(call_.in.logits), t, 0, rule_.columns, scratch.logits);
    }
    std::int32_t hashed[64];
    if (call_.spec.hashed) look_up(t, hashed);
    kernels_.select(rule_, scratch, call_.spec.hashed ? hashed : nullptr,
                    row_of<const float>(call_.in.shared_logits, t), outputs(t));
  }

  void look_up(std::int64_t t, std::int32_t* ids) const {
    const Tensor& table = call_.in.hash_table;
    const std::int64_t token = index_at(call_.in.token_ids, t * call_.in.token_ids.strides[0]);
    for (int k = 0; k < rule_.top_k; ++k) {
      ids[k] = static_cast<std::int32_t>(
          index_at(table, token * table.strides[0] + k * table.strides[1]));
    }
  }

  RowOutputs outputs(std::int64_t t) const {
    return {row_of<std::int32_t>(call_.out.ids, t), row_of<float>(call_.out.weights, t),
            row_of<float>(call_.out.dense, t), row_of<float>(call_.out.logits, t),
            row_of<std::int16_t>(call_.out.replay, t)};
  }

  void clear(std::int64_t begin) const {
    for (std::int64_t t = begin; t < call_.tokens; ++t) {
      const RowOutputs row = outputs(t);
      if (row.ids != nullptr) std::fill_n(row.ids, rule_.slots(), -1);
      if (row.weights != nullptr) std::fill_n(row.weights, rule_.slots(), 0.0F);
      if (row.dense != nullptr) {
        std::fill_n(row.dense, rule_.experts + rule_.shared_count, 0.0F);
      }
      if (row.logits != nullptr) std::fill_n(row.logits, rule_.columns, 0.0F);
      if (row.replay != nullptr) std::fill_n(row.replay, rule_.top_k, std::int16_t{-1});
    }
  }

  const RouteCall& call_;
  const Kernels& kernels_;
  int threads_;
  std::int64_t valid_;
  Carver carver_;
  Plan plan_;
  Rule rule_;
};

}  // namespace

std::size_t route_cpu_workspace_bytes(int threads, const RouteSpec& spec, std::int64_t tokens,
                                      std::int64_t hidden) {
  Carver carver;
  const Plan plan(carver, threads, spec, tokens, hidden);
  return carver.used();
}

void route_cpu(const Context& context, const RouteCall& call, Workspace workspace) {
  Engine(context, call, workspace).run(context.pool());
}

}  // namespace shunt
