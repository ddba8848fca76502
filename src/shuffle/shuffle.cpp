// combine_shuffling() and split_shuffling(): checks of everything they are given, then the engine.
#include <limits>
#include <string>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "cuda/current.hpp"
#include "cuda/runtime.hpp"
#include "shuffle/engine.hpp"

namespace shunt {

namespace {

constexpr std::int64_t max_rows = std::numeric_limits<std::int32_t>::max();

void check_rows(const std::string& name, const Tensor& tensor, const Tensor& like, Device device,
                bool written) {
  check_tensor(name, tensor,
               {.dtypes = {like.dtype},
                .shape = {like.rank > 0 ? like.shape[0] : any_size,
                          like.rank > 1 ? like.shape[1] : any_size},
                .rows_dense = true,
                .written = written},
               device);
  if (bits(tensor.dtype) % 8 != 0) {
    fail(Status::invalid_argument, "{} is {}: its elements must be whole bytes", name,
         tensor.describe());
  }
}

void shuffle(const char* what, const Context& context, const ShuffleSpec& spec, const Tensor& from,
             const char* from_name, const Tensor& token_counts, const Tensor& to,
             const char* to_name, const Tensor& counts, bool combines, Workspace workspace) {
  const Device device = context.device();
  require_legal(supports(spec, Device{}), what);
  require(supports(spec, device), what);
  const std::string prefix = std::string(what) + ": ";
  const Tensor any{.dtype = from.dtype};
  check_rows(prefix + from_name, from, any, device, false);
  check_rows(prefix + to_name, to, from, device, true);
  const std::int64_t rows = from.shape[0];
  if (rows > max_rows) {
    fail(Status::invalid_argument, "{}: {} is {}: more than {} rows", what, from_name,
         from.describe(), max_rows);
  }
  if (spec.padded && rows % spec.ranks != 0) {
    fail(Status::invalid_argument, "{}: {} is {}: padded, its rows must be a multiple of ranks, {}",
         what, from_name, from.describe(), spec.ranks);
  }
  check_tensor(prefix + "token_counts", token_counts,
               {.dtypes = {i32}, .shape = {spec.ranks, spec.experts}, .dense = true}, device);
  const int locals = spec.end() - spec.first_expert;
  if (counts) {
    check_tensor(prefix + "counts", counts, {.dtypes = {i32}, .shape = {locals + 1}, .dense = true},
                 device);
  }
  check_all_apart(what, {{to_name, to}, {"counts", counts}},
                  {{from_name, from}, {"token_counts", token_counts}});
  std::size_t needed = 0;
  carve_segments(spec, {}, needed);
  check_workspace_apart(
      what, workspace, needed, device,
      {{from_name, from}, {"token_counts", token_counts}, {to_name, to}, {"counts", counts}});
  ShuffleCall call{.spec = spec,
                   .combines = combines,
                   .from = from,
                   .to = to,
                   .token_counts = token_counts.as<std::int32_t>(),
                   .counts = counts.as<std::int32_t>(),
                   .segments = carve_segments(spec, workspace, needed)};
  call.segments.size = std::int64_t{spec.ranks} * (combines ? locals : spec.experts);
  if constexpr (cuda_engine::built) {
    if (device.type == DeviceType::cuda) return shuffle_cuda(context, call);
  }
  shuffle_cpu(context, call);
}

}  // namespace

std::size_t shuffle_workspace_bytes(const Context& context, const ShuffleSpec& spec) {
  require_legal(supports(spec, Device{}), "shuffle");
  require(supports(spec, context.device()), "shuffle");
  std::size_t needed = 0;
  carve_segments(spec, {}, needed);
  return needed;
}

void combine_shuffling(const Context& context, const ShuffleSpec& spec, Tensor tokens,
                       Tensor token_counts, Tensor rows, Tensor counts, Workspace workspace) {
  const cuda_engine::Current current(context);
  if (spec.zero_fill) {
    fail(Status::invalid_argument,
         "combine_shuffling: zero_fill is true: only split_shuffling fills");
  }
  shuffle("combine_shuffling", context, spec, tokens, "tokens", token_counts, rows, "rows", counts,
          true, workspace);
}

void split_shuffling(const Context& context, const ShuffleSpec& spec, Tensor rows,
                     Tensor token_counts, Tensor tokens, Workspace workspace) {
  const cuda_engine::Current current(context);
  shuffle("split_shuffling", context, spec, rows, "rows", token_counts, tokens, "tokens", {}, false,
          workspace);
}

}  // namespace shunt
