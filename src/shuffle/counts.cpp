// offsets_from_counts() and counts_from_offsets().
#include <limits>

#include "core/apart.hpp"
#include "core/check.hpp"
#include "cuda/current.hpp"
#include "cuda/runtime.hpp"
#include "shuffle/engine.hpp"

namespace shunt {

namespace {

// Checks both; returns L.
int check_both(const char* what, const Context& context, const Tensor& counts,
               const Tensor& offsets, bool counts_written) {
  const Device device = context.device();
  require(cuda_engine::supported_device(what, device), what);
  const std::string prefix = std::string(what) + ": ";
  check_tensor(prefix + "offsets", offsets,
               {.dtypes = {i32}, .shape = {any_size}, .dense = true, .written = !counts_written},
               device);
  constexpr std::int64_t most = 65536;
  const std::int64_t locals = offsets.shape[0] - 1;
  if (locals < 1 || locals > most) {
    fail(Status::invalid_argument, "{}: offsets is {}: must be [L + 1], L 1 to {}", what,
         offsets.describe(), most);
  }
  const bool with_all = counts.rank == 1 && counts.shape[0] == locals + 1;
  check_tensor(prefix + "counts", counts,
               {.dtypes = {i32},
                .shape = {with_all ? locals + 1 : locals},
                .dense = true,
                .written = counts_written},
               device);
  if (counts_written) {
    check_apart(prefix + "counts", counts, "offsets", offsets);
  } else {
    check_apart(prefix + "offsets", offsets, "counts", counts);
  }
  return static_cast<int>(locals);
}

}  // namespace

void offsets_from_counts(const Context& context, Tensor counts, Tensor offsets) {
  const cuda_engine::Current current(context);
  const char* const what = "offsets_from_counts";
  const int locals = check_both(what, context, counts, offsets, false);
  const auto* const from = counts.as<const std::int32_t>();
  auto* const to = offsets.as<std::int32_t>();
  if constexpr (cuda_engine::built) {
    if (context.device().type == DeviceType::cuda) return offsets_cuda(context, locals, from, to);
  }
  std::int64_t sum = 0;
  for (int e = 0; e < locals; ++e) {
    sum += from[e];
    if (from[e] < 0 || sum > std::numeric_limits<std::int32_t>::max()) {
      fail(Status::invalid_argument,
           "{}: counts[{}] is {}: must be 0 or more, all of them below 2^31", what, e, from[e]);
    }
  }
  to[0] = 0;
  for (int e = 0; e < locals; ++e) to[e + 1] = to[e] + from[e];
}

void counts_from_offsets(const Context& context, Tensor offsets, Tensor counts) {
  const cuda_engine::Current current(context);
  const char* const what = "counts_from_offsets";
  const int locals = check_both(what, context, counts, offsets, true);
  const bool with_all = counts.shape[0] > locals;
  const auto* const from = offsets.as<const std::int32_t>();
  auto* const to = counts.as<std::int32_t>();
  if constexpr (cuda_engine::built) {
    if (context.device().type == DeviceType::cuda) {
      return counts_cuda(context, locals, with_all, from, to);
    }
  }
  for (int e = 0; e < locals; ++e) {
    if (from[0] != 0 || from[e + 1] < from[e]) {
      fail(Status::invalid_argument, "{}: offsets[{}] is {}: must begin with 0 and not descend",
           what, from[0] != 0 ? 0 : e + 1, from[from[0] != 0 ? 0 : e + 1]);
    }
  }
  for (int e = 0; e < locals; ++e) to[e] = from[e + 1] - from[e];
  if (with_all) to[locals] = from[locals];
}

}  // namespace shunt
