// Cases of an expert-parallel group's operations: rows between the order of ranks and that of
// experts, and added back to their tokens.
#include <fmt/core.h>

#include <cmath>
#include <memory>
#include <random>

#include "bench_cases.hpp"
#include "bench_tensors.hpp"
#include "shunt/shuffle.hpp"

namespace shunt::tool {

namespace {

// `from` and `to` [T, H]; counts [ranks, experts].
struct Shuffled {
  Context context;
  ShuffleSpec spec;
  bool combines = true;
  Variants from, to, counts;
  Buffer workspace;

  void run(const Context& where, const Tensor& in, const Tensor& n, const Tensor& out,
           Workspace scratch) const {
    if (combines) {
      combine_shuffling(where, spec, in, n, out, {}, scratch);
    } else {
      split_shuffling(where, spec, in, n, out, scratch);
    }
  }
};

void check_shuffled(const Shuffled& made, const std::string& label) {
  const OnHost in(made.context, made.from[0]), n(made.context, made.counts[0]),
      got(made.context, made.to[0]), want(made.context, made.to[0]);
  const Buffer workspace = host().allocate(shuffle_workspace_bytes(host(), made.spec));
  made.run(host(), in.tensor, n.tensor, want.tensor, workspace);
  const auto bytes = at(got.tensor.bytes());
  const auto *const a = got.tensor.as<char>(), *const b = want.tensor.as<char>();
  const auto first = at(std::mismatch(a, a + bytes, b).first - a);
  if (first < bytes) differs(label, fmt::format("byte {} of the rows", first));
}

StageCase shuffled_case(const Context& context, const bench::StageShape& shape,
                        std::int64_t rotate_bytes) {
  const std::int64_t rows = shape.tokens, hidden = shape.hidden;
  auto made = std::make_shared<Shuffled>(Shuffled{.context = context});
  made->spec = {.ranks = shape.ranks, .experts = shape.route.experts / shape.ranks};
  made->combines = shape.stage == "combine_shuffling";
  require(supports(made->spec, context.device()));
  const double once = element_bytes(shape.dtype) * static_cast<double>(rows * hidden);
  const std::int64_t pairs = std::int64_t{made->spec.ranks} * made->spec.experts;
  const double moved = 2 * once + 4 * static_cast<double>(pairs);
  const std::int64_t copies = variants_for(moved, rotate_bytes);
  made->from = Variants(context, shape.dtype, {rows, hidden}, copies);
  made->to = Variants(context, shape.dtype, {rows, hidden}, copies);
  made->counts = Variants(context, DType::i32, {made->spec.ranks, made->spec.experts}, copies);
  fill(context, made->from, 1, 1);
  std::mt19937_64 random(1);
  std::vector<std::vector<std::int32_t>> drawn(8, std::vector<std::int32_t>(at(pairs)));
  for (auto& counts : drawn) {
    for (std::int64_t i = 0; i < rows; ++i) ++counts[random() % counts.size()];
  }
  upload(context, made->counts, drawn);
  made->workspace = context.allocate(shuffle_workspace_bytes(context, made->spec));
  const std::string label =
      fmt::format("R{} EP{} E{} H{}", rows, made->spec.ranks, made->spec.experts, hidden);
  return {.op = shape.stage,
          .label = label,
          .dtype = shape.dtype,
          .variants = copies,
          .cost = {moved, 0, once},
          .call =
              [made](std::int64_t i) {
                made->run(made->context, made->from[i], made->counts[i], made->to[i],
                          made->workspace);
              },
          .check = [made, label] { check_shuffled(*made, label); }};
}

// rows [ranks * K, H], as [ranks, K, H]; counts [E], tokens_of [K], out [T, H].
struct Added {
  Context context;
  ScatterAddSpec spec;
  int ranks = 1;
  Variants rows, counts, tokens_of, out;
  Buffer workspace;

  void run(const Context& where, const Tensor& from, const Tensor& n, const Tensor& tokens,
           const Tensor& to, Workspace scratch) const {
    const Tensor blocks =
        view(from.data, from.dtype, {ranks, from.shape[0] / ranks, from.shape[1]}, where.device());
    scatter_add_padded(where, spec, {.rows = blocks, .token_counts = n, .token_indices = tokens},
                       to, scratch);
  }
};

void check_added(const Added& made, const std::string& label) {
  const OnHost rows(made.context, made.rows[0]), counts(made.context, made.counts[0]),
      tokens_of(made.context, made.tokens_of[0]), got(made.context, made.out[0]),
      want(made.context, made.out[0]);
  const Buffer workspace = host().allocate(scatter_add_workspace_bytes(
      host(), made.spec, want.tensor.shape[0], tokens_of.tensor.shape[0]));
  made.run(host(), rows.tensor, counts.tensor, tokens_of.tensor, want.tensor, workspace);
  check_close(label, got, want);
}

StageCase added_case(const Context& context, const bench::StageShape& shape, Spread spread,
                     std::int64_t rotate_bytes) {
  const std::int64_t tokens = shape.tokens, hidden = shape.hidden;
  const Batches batches(shape.route, spread, tokens);
  const std::int64_t pairs = tokens * batches.spec.slots;
  auto made = std::make_shared<Added>(
      Added{.context = context, .spec = {.accumulate = false}, .ranks = shape.ranks});
  require(supports(made->spec, context.device()));
  const double element = element_bytes(shape.dtype);
  const double written = element * static_cast<double>(tokens * hidden);
  const double moved =
      element * static_cast<double>(pairs * hidden) + written + 4 * static_cast<double>(pairs);
  const std::int64_t copies = variants_for(moved, rotate_bytes);
  made->rows = Variants(context, shape.dtype, {shape.ranks * pairs, hidden}, copies);
  made->counts = Variants(context, DType::i32, {batches.spec.experts}, copies);
  made->tokens_of = Variants(context, DType::i32, {pairs}, copies);
  made->out = Variants(context, shape.dtype, {tokens, hidden}, copies);
  fill(context, made->rows, 1, 1);
  std::vector<std::vector<std::int32_t>> counts, tokens_of;
  for (const auto& offsets : batches.offsets) {
    counts.emplace_back();
    for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
      counts.back().push_back(offsets[e + 1] - offsets[e]);
    }
  }
  for (const auto& permutation : batches.permutation) {
    tokens_of.push_back(permutation);
    for (auto& pair : tokens_of.back()) pair /= batches.spec.slots;
  }
  upload(context, made->counts, counts);
  upload(context, made->tokens_of, tokens_of);
  made->workspace =
      context.allocate(scatter_add_workspace_bytes(context, made->spec, tokens, pairs));
  const std::string label = fmt::format("T{} R{} EP{} H{}", tokens, pairs, shape.ranks, hidden);
  return {.op = shape.stage,
          .label = label,
          .dtype = shape.dtype,
          .variants = copies,
          .cost = {moved, static_cast<double>(pairs * hidden), written},
          .call =
              [made](std::int64_t i) {
                made->run(made->context, made->rows[i], made->counts[i], made->tokens_of[i],
                          made->out[i], made->workspace);
              },
          .check = [made, label] { check_added(*made, label); }};
}

}  // namespace

StageCase ranks_case(const Context& context, const bench::StageShape& shape, Spread spread,
                     std::int64_t rotate_bytes) {
  if (shape.stage == "scatter_add") return added_case(context, shape, spread, rotate_bytes);
  return shuffled_case(context, shape, rotate_bytes);
}

}  // namespace shunt::tool
