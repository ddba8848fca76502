// scatter_add_padded(): checks of everything it is given, and the CPU engine.
//
// The CPU engine lists each token's positions by a counting sort, stable, on one thread; then the
// threads share the tokens. Bytes: every row in use is read once, every output read and written.
#include <algorithm>
#include <limits>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "core/workspace.hpp"
#include "cpu/convert.hpp"
#include "cpu/pool.hpp"
#include "cuda/current.hpp"
#include "cuda/runtime.hpp"
#include "shuffle/engine.hpp"

namespace shunt {

namespace {

using cpu_engine::Form;

struct Lists {
  std::int32_t* begin = nullptr;      // [T + 1]: token t has positions[begin[t]] .. [begin[t + 1]]
  std::int32_t* positions = nullptr;  // [K]
  std::int32_t* ranks = nullptr;      // [K]: who sent a position's row
};

Lists carve(Workspace workspace, std::int64_t tokens, std::int64_t positions, std::size_t& bytes) {
  Carver carver(workspace);
  Lists lists;
  lists.begin = carver.take<std::int32_t>(tokens + 1);
  lists.positions = carver.take<std::int32_t>(positions);
  lists.ranks = carver.take<std::int32_t>(positions);
  bytes = carver.used();
  return lists;
}

void fill(const Lists& lists, const ScatterAddInputs& in, std::int64_t tokens) {
  const std::int64_t experts = in.token_counts.shape[0], positions = in.token_indices.shape[0];
  const std::int64_t experts_of_rank = experts / in.rows.shape[0];
  const std::int32_t* counts = in.token_counts.as<std::int32_t>();
  const std::int32_t* token_of = in.token_indices.as<std::int32_t>();
  const auto is_token = [&](std::int64_t q) { return token_of[q] >= 0; };
  std::int64_t p = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    if (counts[e] < 0 || p + counts[e] > positions) {
      fail(Status::invalid_argument,
           "scatter_add_padded: token_counts[{}] is {}: must be 0 to {}, the positions left", e,
           counts[e], positions - p);
    }
    for (std::int32_t i = 0; i < counts[e]; ++i) {
      lists.ranks[p++] = static_cast<std::int32_t>(e / experts_of_rank);
    }
  }
  for (std::int64_t q = 0; q < p; ++q) {
    if (token_of[q] < -1 || token_of[q] >= tokens) {
      fail(Status::invalid_argument,
           "scatter_add_padded: token_indices[{}] is {}: must be -1 to {}", q, token_of[q],
           tokens - 1);
    }
  }
  // begin[t + 1] counts, then holds where token t goes on, and at last where it ends.
  std::fill_n(lists.begin, tokens + 1, 0);
  for (std::int64_t q = 0; q < p; ++q) {
    if (is_token(q) && token_of[q] + 1 < tokens) ++lists.begin[token_of[q] + 2];
  }
  for (std::int64_t t = 2; t <= tokens; ++t) lists.begin[t] += lists.begin[t - 1];
  for (std::int64_t q = 0; q < p; ++q) {
    if (is_token(q)) {
      lists.positions[lists.begin[token_of[q] + 1]++] = static_cast<std::int32_t>(q);
    }
  }
}

void scatter_add_cpu(const Context& context, const ScatterAddSpec& spec, const ScatterAddInputs& in,
                     const Tensor& out, const Lists& lists) {
  fill(lists, in, out.shape[0]);
  constexpr std::size_t strip = 256;
  const auto width = static_cast<std::size_t>(out.shape[1]);
  const auto from = static_cast<Form>(in.rows.dtype), to = static_cast<Form>(out.dtype);
  const auto convert = cpu_engine::convert_kernels(context.pool().isa()).row;
  const std::int64_t grain = std::max<std::int64_t>(
      1, 16384 / std::max<std::int64_t>(1, static_cast<std::int64_t>(width)));
  context.pool().split(out.shape[0], grain, [&](std::int64_t begin, std::int64_t end) {
    float sum[strip], row[strip];
    for (std::int64_t t = begin; t < end; ++t) {
      char* const line = out.as<char>() + bytes(out.dtype, t * out.strides[0]);
      for (std::size_t h = 0; h < width; h += strip) {
        const std::size_t n = std::min(strip, width - h);
        std::fill_n(sum, n, 0.0F);
        const auto add = [&](const char* data, Form form) {
          convert(data + h * cpu_engine::form_bytes(form), form, 1, row, Form::f32, n);
          for (std::size_t i = 0; i < n; ++i) sum[i] += row[i];
        };
        for (std::int32_t i = lists.begin[t]; i < lists.begin[t + 1]; ++i) {
          const std::int64_t p = lists.positions[i];
          const std::int64_t at = lists.ranks[p] * in.rows.strides[0] + p * in.rows.strides[1];
          add(in.rows.as<char>() + bytes(in.rows.dtype, at), from);
        }
        if (spec.accumulate) add(line, to);
        convert(sum, Form::f32, 1, line + h * cpu_engine::form_bytes(to), to, n);
      }
    }
  });
}

// What 32-bit indices count: positions, and where each token's begin and the last one's end.
void check_sizes(std::int64_t tokens, std::int64_t positions) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  const auto check = [](const char* name, std::int64_t size, std::int64_t limit) {
    if (size >= 0 && size <= limit) return;
    fail(Status::invalid_argument, "scatter_add_padded: {} is {}: must be 0 to {}", name, size,
         limit);
  };
  check("tokens", tokens, most - 1);
  check("positions", positions, most);
}

}  // namespace

std::size_t scatter_add_workspace_bytes(const Context& context, const ScatterAddSpec& spec,
                                        std::int64_t tokens, std::int64_t positions) {
  require(supports(spec, context.device()), "scatter_add_padded");
  check_sizes(tokens, positions);
  if constexpr (cuda_engine::built) {
    if (context.device().type == DeviceType::cuda) {
      return scatter_add_cuda_workspace_bytes(tokens, positions);
    }
  }
  std::size_t needed = 0;
  carve({}, tokens, positions, needed);
  return needed;
}

void scatter_add_padded(const Context& context, const ScatterAddSpec& spec,
                        const ScatterAddInputs& in, Tensor out, Workspace workspace) {
  const cuda_engine::Current current(context);
  const Device device = context.device();
  require(supports(spec, device), "scatter_add_padded");
  check_tensor(
      "scatter_add_padded: out", out,
      {.dtypes = float_dtypes, .shape = {any_size, any_size}, .rows_dense = true, .written = true},
      device);
  const std::int64_t tokens = out.shape[0], width = out.shape[1];
  check_tensor("scatter_add_padded: rows", in.rows,
               {.dtypes = float_dtypes, .shape = {any_size, any_size, width}, .rows_dense = true},
               device);
  const std::int64_t ranks = in.rows.shape[0], positions = in.rows.shape[1];
  check_tensor("scatter_add_padded: token_counts", in.token_counts,
               {.dtypes = {i32}, .shape = {any_size}, .dense = true}, device);
  check_tensor("scatter_add_padded: token_indices", in.token_indices,
               {.dtypes = {i32}, .shape = {positions}, .dense = true}, device);
  check_sizes(tokens, positions);
  const NamedTensor written[] = {{"out", out}};
  const NamedTensor read[] = {
      {"rows", in.rows}, {"token_counts", in.token_counts}, {"token_indices", in.token_indices}};
  check_all_apart("scatter_add_padded", written, read);
  const std::int64_t experts = in.token_counts.shape[0];
  if (ranks < 1 || ranks > max_scatter_ranks) {
    fail(Status::invalid_argument, "scatter_add_padded: rows is {}: must have 1 to {} ranks",
         in.rows.describe(), max_scatter_ranks);
  }
  if (experts < 1 || experts % ranks != 0) {
    fail(Status::invalid_argument,
         "scatter_add_padded: token_counts has {} experts and rows {} ranks: experts must be a "
         "multiple of ranks",
         experts, ranks);
  }
  check_workspace_apart("scatter_add_padded", workspace,
                        scatter_add_workspace_bytes(context, spec, tokens, positions), device,
                        written, read);
  if constexpr (cuda_engine::built) {
    if (device.type == DeviceType::cuda) {
      return scatter_add_cuda(context, spec, in, out, workspace);
    }
  }
  std::size_t needed = 0;
  scatter_add_cpu(context, spec, in, out, carve(workspace, tokens, positions, needed));
}

}  // namespace shunt
